"""The gradient tape in one process, and among threads that stand for ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.config.errors import ConfigError
from tests.unit.threaded_exchange import Meeting, Replica, outcomes_on

NONE, ZERO = tf.UnconnectedGradients.NONE, tf.UnconnectedGradients.ZERO


def on_ranks(size, body):
    """Run `body(rank, options of a tape)` on a thread for each rank; return rank 0's result and what was sent."""
    meeting = Meeting(size)
    outcomes = outcomes_on(size, lambda rank: body(rank, {"exchange": Replica(meeting, rank)}))
    return outcomes[0], [what[1] for what in meeting.log]


def test_it_is_a_tape_of_tensorflows_with_its_arguments(session):
    kept, watched = tf.Variable(2.0), keras.Variable(3.0)
    with hvdtrain.DistributedGradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch([watched])
        y = kept * watched.value * watched.value
    assert isinstance(tape, tf.GradientTape)
    for _ in range(2):
        gradients = tape.gradient(y, {"kept": kept, "watched": watched})
        assert gradients["kept"] is None
        assert float(gradients["watched"]) == 12.0
    assert float(tape.gradient(y, kept, unconnected_gradients=ZERO)) == 0.0
    assert float(tape.gradient(y, watched, tf.constant(2.0), NONE)) == 24.0


@pytest.mark.parametrize("op", ["average", "sum"])
def test_a_variable_that_some_ranks_do_not_use_has_a_gradient_of_zero_there(op):
    def body(rank, options):
        variable = tf.Variable(5.0, name="seldom")
        with hvdtrain.DistributedGradientTape(op=op, **options) as tape:
            y = variable * 3.0 if rank == 0 else tf.constant(1.0)
        return float(tape.gradient(y, [variable], unconnected_gradients=ZERO)[0])

    assert on_ranks(2, body)[0] == (1.5 if op == "average" else 3.0)


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_horovods_constants_and_compressors_stand_for_names(compression):
    hvd = pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed")

    def gradient(**arguments):
        def body(rank, options):
            variable = tf.Variable([1.0, 2.0], name="v")
            with hvdtrain.DistributedGradientTape(**arguments, **options) as tape:
                y = variable * variable * (rank + 1.0)
            return tape.gradient(y, variable).numpy()

        return on_ranks(2, body)

    by_name, sent = gradient(op="sum", compression=compression)
    by_constant, sent_too = gradient(op=hvd.Sum, compression=getattr(hvd.Compression, compression))
    np.testing.assert_array_equal(by_constant, by_name)
    assert sent_too == sent
    np.testing.assert_allclose(by_name, [6.0, 12.0])


class Halving:
    """A compressor as users write them."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, tensor.dtype

    @staticmethod
    def decompress(tensor, context):
        return tf.cast(tensor, context) * 2


@pytest.mark.parametrize("op", ["sum", "max"])
def test_a_compressor_of_the_users_own(op):
    def body(rank, options):
        variable, unused = tf.Variable([1.0], name="v"), tf.Variable(0.0, name="unused")
        with hvdtrain.DistributedGradientTape(op=op, compression=Halving, **options) as tape:
            y = variable * (rank + 1.0)
        value, nothing = tape.gradient(y, [variable, unused])
        return float(value[0]), nothing

    assert on_ranks(2, body)[0] == (3.0 if op == "sum" else 2.0, None)


@pytest.mark.parametrize(("scales", "expected"), [(True, [1.5, 0.5]), (False, [1.5, 1.0])])
def test_local_sources_keep_their_own_gradients(scales, expected):
    def body(rank, options):
        shared, own = keras.Variable(1.0, name="shared"), keras.Variable(1.0, name=f"own{rank}")
        tape = hvdtrain.DistributedGradientTape(scale_local_gradients=scales, **options)
        tape.register_local_source(own)
        with tape:
            y = (shared.value + own.value) * (rank + 1.0)
        local, reduced = tape.get_local_and_global_gradients(y, [own, shared])
        assert (local[0][0], reduced[0][0]) == (own, shared)
        return [float(reduced[0][1]), float(local[0][1])]

    found, sent = on_ranks(2, body)
    assert found == expected
    assert len(sent) == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("pfor", [True, False])
def test_jacobians_are_reduced_once(pfor, compiled, session):
    """Element by element: TensorFlow computes them by `gradient`, which must not reduce by itself meanwhile."""
    variable = tf.Variable([1.0, 2.0])

    def jacobian():
        with hvdtrain.DistributedGradientTape(persistent=True, op="sum") as tape:
            y = tf.stack([variable[0] * variable[1], variable[0] ** 2])
        return tape.jacobian(y, {"v": variable}, experimental_use_pfor=pfor)["v"]

    np.testing.assert_allclose((tf.function(jacobian) if compiled else jacobian)(), [[2.0, 1.0], [2.0, 0.0]])

    def body(rank, options):
        own = tf.Variable([1.0, 2.0], name="v")
        with hvdtrain.DistributedGradientTape(persistent=True, **options) as tape:
            y = tf.stack([own[0] * own[1], own[0] ** 2]) * (rank + 1.0)
        whole = tape.jacobian(y, own, experimental_use_pfor=pfor)
        return whole.numpy(), tape.gradient(y, own).numpy()

    (whole, gradient), sent = on_ranks(2, body)
    np.testing.assert_allclose(whole, 1.5 * np.array([[2.0, 1.0], [2.0, 0.0]]))
    np.testing.assert_allclose(gradient, [6.0, 1.5])
    assert sent == ["jacobian/v", "gradient/v"]


def test_gradients_by_a_ranks_own_samples_are_not_reduced():
    """As in a gradient penalty, whose inner tape differentiates by samples, of which each rank has others."""

    def body(rank, options):
        variable, own = tf.Variable([2.0, 3.0], name="v"), tf.Variable(1.0, name="own")
        x = tf.constant([[1.0, 0.0], [0.0, 2.0]]) * (rank + 1.0)
        options |= {"op": "sum", "persistent": True}
        with hvdtrain.DistributedGradientTape(**options) as outer:
            outer.register_local_source(own)
            outer.watch(x)
            with hvdtrain.DistributedGradientTape(**options) as tape:
                tape.watch(x)
                each = tf.reduce_sum(variable * x * x, 1) * own
            by_sample = tape.gradient(each, x)
            penalty = tf.reduce_sum(by_sample**2)
        mixed = outer.gradient(penalty, {"samples": [x], "weights": [variable]})
        kept, shared = outer.get_local_and_global_gradients(penalty, [x, variable, own])
        assert [source is own or source is x for source, _ in kept] == [True, True]
        results = [by_sample, tape.jacobian(each, x), tape.batch_jacobian(each[:, None], x), *mixed["samples"]]
        return [each.numpy() for each in [*results, *mixed["weights"], shared[0][1]]]

    alone, with_another = (on_ranks(size, body)[0] for size in (1, 2))
    for found, expected in zip(with_another[:4], alone[:4], strict=True):
        np.testing.assert_array_equal(found, expected)
    for found, expected in zip(with_another[4:], alone[4:], strict=True):
        np.testing.assert_array_equal(found, expected * (1 + 2**2))
    assert on_ranks(2, body)[1] == ["gradient/v", "gradient/v"]


def test_batch_jacobians_by_variables_are_refused_with_what_to_write_instead(session):
    with hvdtrain.DistributedGradientTape(persistent=True) as tape:
        y = VARIABLE * tf.ones([2, 3])
    with pytest.raises(ConfigError, match=r"'twice'\. Call jacobian\(target, variable\)"):
        tape.batch_jacobian(y, VARIABLE)


def test_groups_are_of_variables_and_not_of_names():
    def body(rank, options):
        variables = [tf.Variable(float(i)) for i in range(3)]  # all are called Variable
        with hvdtrain.DistributedGradientTape(groups=[variables[:2]], **options) as tape:
            y = tf.add_n([v * v for v in variables])
        return [float(each) for each in tape.gradient(y, variables)]

    found, sent = on_ranks(2, body)
    assert found == [0.0, 2.0, 4.0]
    assert len(sent) == 2


def test_num_groups_is_the_older_name_of_groups(session):
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvdtrain.DistributedGradientTape(num_groups=2)


VARIABLE = tf.Variable(1.0, name="twice")


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"op": "mean"}, "op must be one of average, sum"),
        ({"compression": "int8"}, "compression must be one of none"),
        ({"compression": 3}, "a class with compress and decompress. Received: 3"),
        ({"groups": [[VARIABLE], [VARIABLE]]}, "groups must not share a variable. Received: 'twice'"),
        ({"tape": tf.GradientTape(), "persistent": True}, "arguments of a new tape"),
        ({"tape": True}, "is a tf.GradientTape. Received: bool"),
    ],
)
def test_arguments_that_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        hvdtrain.DistributedGradientTape(**arguments)


def test_rows_have_neither_least_nor_greatest(session):
    table = tf.Variable(tf.ones([3, 2]))
    with hvdtrain.DistributedGradientTape(op="max") as tape:
        y = tf.gather(table, [1])
    with pytest.raises(NotImplementedError, match="sparse_as_dense=True"):
        tape.gradient(y, table)


@pytest.mark.usefixtures("session")
def test_optimizers_and_accumulators_take_what_a_saved_model_can_hold():
    hvd = pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed")
    inner = keras.optimizers.SGD(1.0)
    optimizer = hvdtrain.DistributedOptimizer(inner, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert (optimizer.get_config()["op"], optimizer.get_config()["compression"]) == ("sum", "fp16")
    with pytest.raises(ConfigError, match=r"which a saved model can hold\. Received: <class '.*Halving'>"):
        hvdtrain.DistributedOptimizer(inner, compression=Halving)
    with pytest.raises(ConfigError, match="'max' is for DistributedGradientTape"):
        hvdtrain.DistributedOptimizer(inner, op=hvd.Max)
    with pytest.raises(ConfigError, match="'min' is for DistributedGradientTape"):
        hvdtrain.GradientAccumulator([VARIABLE], steps=2, op="min")


def test_an_optimizer_leaves_local_variables_to_their_rank():
    def body(rank, options):
        shared, own = (keras.Variable(0.0, name=name) for name in ("shared", f"own{rank}"))
        optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=False, **options)
        optimizer.register_local_var(own)
        optimizer.apply([tf.constant(rank + 1.0), tf.constant(rank + 1.0)], [shared, own])
        return float(shared), float(own)

    assert on_ranks(2, body)[0] == (-1.5, -1.0)
