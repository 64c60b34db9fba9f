"""What the face's collectives refuse, with Horovod's types of exception, on all ranks; and v1 sessions' objects."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from checks.face_matrix import MODES
from world import World
from worlds import worlds

import hvdtrain.horovod as hvd

DIFFERENT = tf.errors.FailedPreconditionError
"""Ranks sent what does not belong together."""
INVALID = tf.errors.InvalidArgumentError


def refused(kind: Any, words: str, call: Callable[[], Any], modes: Any = MODES) -> None:
    for mode in modes:
        try:
            MODES[mode]([call])
        except kind as error:
            assert words in str(error), (mode, error)
        else:
            raise AssertionError(f"{kind} with {words!r} was not raised ({mode})")


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "allreduce": hvd.allreduce,
    "grouped_allreduce": lambda x, **options: hvd.grouped_allreduce([x, x + x], **options),
    "sparse allreduce": lambda x, **options: hvd.allreduce(tf.IndexedSlices(x, tf.range(2)), **options).values,
    "allgather": hvd.allgather,
    "grouped_allgather": lambda x, **options: hvd.grouped_allgather([x, x + x], **options),
    "broadcast": lambda x, **options: hvd.broadcast(x, 0, **options),
    "alltoall": hvd.alltoall,
    "reducescatter": hvd.reducescatter,
    "grouped_reducescatter": lambda x, **options: hvd.grouped_reducescatter([x, x + x], **options),
}
OF_ONE_SHAPE = set(COLLECTIVES) - {"sparse allreduce"}


@worlds("mpirun-2", "gloo-2", extended=True)
def check_tensors_that_differ_between_ranks(world: World) -> None:
    def shapes() -> tf.Tensor:
        return tf.ones([2, world.rank + 1])

    def dtypes() -> tf.Tensor:
        return tf.ones([2, 2], tf.float32 if world.rank else tf.int32)

    for name, function in COLLECTIVES.items():
        if name in OF_ONE_SHAPE and not name.startswith("grouped"):
            refused(DIFFERENT, "Mismatched", lambda function=function: function(shapes()))
            refused(DIFFERENT, "Mismatched data types", lambda function=function: function(dtypes()))
    refused(DIFFERENT, "root rank", lambda: hvd.broadcast(tf.ones(2), world.rank))
    refused(DIFFERENT, "Mismatched reduction operation", lambda: hvd.allreduce(tf.ones(2), op=3 + world.rank))
    refused(DIFFERENT, "prescale and/or postscale", lambda: hvd.allreduce(tf.ones(2), prescale_factor=1.0 + world.rank))


@worlds("mpirun-2", "gloo-2", extended=True)
def check_arguments_that_no_rank_can_use(world: World) -> None:
    rows = tf.ones([world.size + 1])
    refused(INVALID, "splits", lambda: hvd.alltoall(rows * 1.0), ["eager"])
    refused(INVALID, "splits", lambda: hvd.alltoall(tf.ones([1]), tf.ones([world.size], tf.int32)))
    refused((INVALID, ValueError, DIFFERENT), "", lambda: hvd.reducescatter(tf.constant(1.0)))
    refused((INVALID, ValueError, DIFFERENT), "", lambda: hvd.grouped_reducescatter([tf.ones([2]), tf.constant(1.0)]))
    slices = [tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))]
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        if op != hvd.Adasum or hvd.mpi_enabled():
            words = "sparse_as_dense=True" if op == hvd.Adasum else "Only Sum and Average"
            refused(NotImplementedError, words, lambda op=op: hvd.allreduce(slices[0], op=op), ["eager"])
            refused(NotImplementedError, words, lambda op=op: hvd.grouped_allreduce(slices, op=op), ["eager"])
    refused(NotImplementedError, "Pre/postscale", lambda: hvd.allreduce(slices[0], prescale_factor=2.0), ["eager"])


@worlds("mpirun-2", "gloo-2", extended=True)
def check_process_sets_of_others_and_unknown_ones(world: World) -> None:
    sets = [hvd.add_process_set([rank]) for rank in range(world.size)]
    other = sets[(world.rank + 1) % world.size]
    unknown = hvd.ProcessSet([0])
    unknown.process_set_id = 99
    for name, function in COLLECTIVES.items():
        call = lambda group, function=function: function(tf.ones([2, 2]), process_set=group)  # noqa: E731
        # A broadcast's root is none of the other's ranks.
        refused((INVALID, ValueError) if name == "broadcast" else INVALID, "", lambda call=call: call(other))
        refused(ValueError, "", lambda call=call: call(unknown))
    np.testing.assert_array_equal(
        hvd.broadcast_object(world.rank, world.rank, process_set=sets[world.rank]), world.rank
    )
    world.gather(b"")
    assert all(hvd.remove_process_set(each) for each in sets)
    assert not hvd.remove_process_set(hvd.global_process_set)


def reduced_gradient(variable: tf.Variable, group: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = variable * 2.0
    return hvd.DistributedGradientTape(tape, process_set=group).gradient(loss, [variable])


@worlds("mpirun-2", "gloo-2", extended=True)
def check_process_sets_that_were_removed_or_never_added(world: World) -> None:
    """Horovod's own ops would take them for all ranks."""
    removed = hvd.add_process_set([world.size - 1])
    world.gather(b"")
    hvd.remove_process_set(removed)
    words = "must be initialized, and not removed. Received: ProcessSet(process_set_id=None"
    variable = tf.Variable(1.0)
    for group in (removed, hvd.ProcessSet([0])):
        for function in COLLECTIVES.values():
            refused(ValueError, words, lambda f=function, group=group: f(tf.ones([2, 2]), process_set=group))
        others: list[Callable[[], Any]] = [
            lambda group=group: hvd.broadcast_variables([variable], 0, process_set=group),
            lambda group=group: hvd.broadcast_([variable], 0, process_set=group),
            lambda group=group: hvd.broadcast_object(1, process_set=group),
            lambda group=group: hvd.allgather_object(1, process_set=group),
            lambda group=group: reduced_gradient(variable, group),
        ]
        for call in others:
            refused(ValueError, words, call, ["eager"])


@worlds("mpirun-2", "gloo-2", extended=True)
def check_objects_in_a_session(world: World) -> None:
    """Of different types, too, and so large that TensorFlow's optimizer keeps no constant of them."""
    root = world.size - 1
    mine: Any = {"root": np.ones(1_500_000)} if world.rank == root else None
    with tf.Graph().as_default():
        with tf.compat.v1.Session() as session:
            send = hvd.broadcast_object_fn(root, name="sent")
            operations = len(tf.compat.v1.get_default_graph().get_operations())
            for turn in range(2):
                assert send({"turn": turn} if world.rank == root else None) == {"turn": turn}
            assert len(tf.compat.v1.get_default_graph().get_operations()) == operations
            assert hvd.broadcast_object(mine, root)["root"].sum() == 1_500_000
            assert hvd.allgather_object([world.rank] * world.rank) == [[rank] * rank for rank in range(world.size)]
        session = tf.compat.v1.Session()
        assert hvd.broadcast_object(world.rank, root, session=session) == root
        assert hvd.allgather_object(world.rank, session) == list(range(world.size))
        assert hvd.broadcast_object_fn(root, session)(world.rank) == root
        refused(ValueError, "needs a session", lambda: hvd.broadcast_object(1), ["eager"])
        refused(ValueError, "needs a session", lambda: hvd.allgather_object(1), ["eager"])
    compiled = ["tf.function"]
    refused(ValueError, "outside of tf.function", lambda: hvd.broadcast_object(1), compiled)
    refused(ValueError, "outside of tf.function", lambda: hvd.allgather_object(1), compiled)
    assert hvd.broadcast_object(world.rank, root, session="ignored, as in Horovod") == root


@worlds("mpirun-2", "gloo-2", extended=True)
def check_reference_variables(world: World) -> None:
    """TensorFlow 1's variables without a resource, alone and not beside others."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        plain, resource = (
            tf.compat.v1.get_variable(f"v{kind}", initializer=tf.ones(2) * world.rank, use_resource=kind)
            for kind in (False, True)
        )
        session.run(tf.compat.v1.global_variables_initializer())
        for variable in (plain, resource):
            np.testing.assert_array_equal(session.run(hvd.broadcast_([variable], 1))[0], [1, 1])
            np.testing.assert_array_equal(session.run(variable), [1, 1])
        refused(ValueError, "same kind", lambda: hvd.broadcast_([plain, resource], 0), ["eager"])
