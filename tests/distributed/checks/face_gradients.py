"""Gradients of the face's collectives by dtype, that of the incoming gradient, execution mode and process set."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from checks.face_matrix import FLOATS, OPERATIONS, Case, process_sets, run, tensor
from world import World
from worlds import worlds

import hvdtrain.horovod as hvd

UPSTREAM = {"float32": ["float32", "float64"], "float64": ["float32", "float64"]}
"""Dtypes of incoming gradients; TensorFlow sends float32 zeros for unused outputs of any dtype. Others: their own."""


@dataclass(frozen=True)
class Rule:
    """A collective of one tensor, the shapes of its input and output by rank, and its gradient.

    `expected` maps the incoming gradients of the set's ranks, and the place of one rank, to that rank's gradient.
    """

    name: str
    call: Callable[[tf.Tensor, dict[str, Any]], tf.Tensor]
    group: Callable[[list[tf.Tensor], dict[str, Any]], list[tf.Tensor]] | None
    rows_in: Callable[[int, int], int]
    rows_out: Callable[[int, int], int]
    expected: Callable[[list[np.ndarray], int], np.ndarray]


def rules() -> list[Rule]:
    """All collectives; a gather's and a broadcast's gradients are averages, as Horovod documents them."""

    def reduction(op: str) -> Rule:
        options = {"op": getattr(hvd, op)}
        return Rule(
            f"allreduce {op}",
            lambda x, group: hvd.allreduce(x, **options, **group),
            lambda xs, group: hvd.grouped_allreduce(xs, **options, **group),
            lambda place, size: 2,
            lambda place, size: 2,
            lambda upstream, place: OPERATIONS[op](np.stack(upstream)),
        )

    def scatter(op: str) -> Rule:
        options = {"op": getattr(hvd, op), "prescale_factor": 0.5, "postscale_factor": 4.0}
        return Rule(
            f"reducescatter {op}",
            lambda x, group: hvd.reducescatter(x, **options, **group),
            lambda xs, group: hvd.grouped_reducescatter(xs, **options, **group),
            lambda place, size: 2 * size + 1,
            lambda place, size: 3 if place == 0 else 2,
            lambda upstream, place: np.concatenate(upstream) * 2.0 * (len(upstream) if op == "Sum" else 1),
        )

    gather = Rule(
        "allgather",
        hvd_with(hvd.allgather),
        hvd_with(hvd.grouped_allgather),
        lambda place, size: place + 1,
        lambda place, size: size * (size + 1) // 2,
        lambda upstream, place: np.mean(upstream, 0)[place * (place + 1) // 2 :][: place + 1],
    )
    exchange = Rule(
        "alltoall",
        hvd_with(hvd.alltoall),
        None,
        lambda place, size: 2 * size,
        lambda place, size: 2 * size,
        lambda upstream, place: np.concatenate([each[2 * place : 2 * place + 2] for each in upstream]),
    )
    return [reduction("Sum"), reduction("Average"), scatter("Sum"), scatter("Average"), gather, exchange]


def hvd_with(function: Callable[..., Any]) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda x, group: function(x, **group)


def ramp(rows: int, rank: int) -> np.ndarray:
    return (np.arange(rows * 2).reshape(rows, 2) % 4 + 1.0) * (rank + 1)


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
def check_gradients(world: World) -> None:
    with process_sets(world) as sets:
        run([case for group, ranks in sets for case in gradient_cases(world.rank, group, ranks)])


def gradient_cases(me: int, group: Any, ranks: list[int]) -> Iterator[Case]:
    place, size, options = ranks.index(me), len(ranks), {"process_set": group}
    for rule in rules():
        upstream = [ramp(rule.rows_out(i, size), rank) for i, rank in enumerate(ranks)]
        expected = rule.expected(upstream, place)
        rows = rule.rows_in(place, size)
        for dtype in FLOATS:
            for incoming in UPSTREAM.get(dtype, [dtype]):

                def alone(rule: Rule = rule, dtype: str = dtype, incoming: str = incoming, up: Any = upstream) -> Any:
                    x = tensor(ramp(rule.rows_in(place, size), me), dtype)
                    with tf.GradientTape() as tape:
                        tape.watch(x)
                        y = rule.call(x, options)
                    return tape.gradient(y, x, tensor(up[place], incoming))

                def first_of_two(rule: Rule = rule, dtype: str = dtype, inc: str = incoming, up: Any = upstream) -> Any:
                    """Of two tensors only the first is used: the other's incoming gradient is zero."""
                    xs = [tensor(ramp(rule.rows_in(place, size), me), dtype) for _ in range(2)]
                    with tf.GradientTape() as tape:
                        tape.watch(xs)
                        y = rule.group(xs, options)[0] if rule.group else None
                    return tape.gradient(y, xs, tensor(up[place], inc))

                label = f"gradient of {rule.name} {dtype}, incoming {incoming}, {ranks}"
                yield Case(label, alone, [expected], [dtype])
                if rule.group is not None:
                    yield Case(f"{label}, grouped", first_of_two, [expected, np.zeros((rows, 2))], [dtype] * 2)
    for root in ranks:
        upstream = [ramp(2, rank) for rank in ranks]
        for dtype in FLOATS:

            def sent(root: int = root, dtype: str = dtype) -> Any:
                x = tensor(ramp(2, me), dtype)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = hvd.broadcast(x, root, process_set=group)
                return tape.gradient(y, x, tensor(ramp(2, me), UPSTREAM.get(dtype, [dtype])[0]))

            label = f"gradient of broadcast from {root}, {dtype}, {ranks}"
            yield Case(label, sent, [np.mean(upstream, 0) * (me == root)], [dtype])


@worlds("mpirun-2", "gloo-2", extended=True)
def check_ranks_whose_incoming_gradients_differ_in_dtype(world: World) -> None:
    """They travel in the dtype of the input; sent as they are they would not match, and neither rank would go on."""
    x = tf.constant([[1.0], [2.0]], tf.float64)
    for function in (hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0), hvd.alltoall, hvd.reducescatter):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        gradient = tape.gradient(y, x, tf.ones_like(y, tf.float32 if world.rank else tf.float64))
        assert gradient.dtype == tf.float64
        np.testing.assert_array_equal(gradient, np.zeros((2, 1)) + (function.__name__ != "<lambda>" or world.rank == 0))


@worlds("mpirun-2", "gloo-2", extended=True)
def check_a_gradient_of_a_few_rows(world: World) -> None:
    """Rows picked from a result send a sparse gradient back; on another rank it may be dense."""
    x = tf.reshape(tf.range(8.0), [4, 2])
    for function in (hvd.allreduce, hvd.allgather):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            picked = tf.gather(y, [1, 1]) if world.rank == 0 else y[:1]
        gradient = tf.convert_to_tensor(tape.gradient(picked, x)).numpy()
        expected = np.zeros((4, 2))
        if function is hvd.allreduce or world.rank == 0:
            expected[0], expected[1] = (world.size - 1) / world.size, 2 / world.size
        np.testing.assert_allclose(gradient, expected)
