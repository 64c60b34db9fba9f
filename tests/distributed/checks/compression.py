"""Gradients in 16 bits on the wire: what is left of them, and that all ranks hold the same."""

from typing import Any

import numpy as np
import tensorflow as tf
from checks.exchange import optimized_collectives
from world import World, grappler
from worlds import worlds

import hvdtrain
from hvdtrain.gradients.reduction import GradientReducer, reduction_options

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
UNDERFLOW = {"bf16": 0.0, "fp16": 2.0**-39}
SHAPES = [(33, 7), (), (0, 3), (129,)]


def values_of(rank: int, dtype: str) -> list[np.ndarray]:
    """Values of either sign between 1e-12 and 1e6."""
    rng = np.random.default_rng([5, rank])
    return [
        np.asarray(rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(-12, 6, shape)).astype(dtype)
        for shape in SHAPES
    ]


def bound(world: World, parts: list[np.ndarray]) -> dict[str, np.ndarray]:
    """The documented bound for each element of a sum, with the largest value of all for that of a chunk."""
    absolute = [np.abs(part.astype(np.float64)) for part in parts]
    total, largest = sum(absolute), sum(a.max() for a in absolute)
    g = (world.size + 1) * 2.0**-24 / (1 - (world.size + 1) * 2.0**-24)
    allowed = {}
    for wire, roundoff in UNIT_ROUNDOFF.items():
        u, t = roundoff + 2.0**-24, UNDERFLOW[wire]
        first = u * total + t * largest
        second = ((1 + g) * (1 + u) - 1) * (total + first) + t * (1 + g) * (1 + u + t) * largest
        allowed[wire] = first + second
    return allowed


def reduced(world: World, arrays: list[np.ndarray], *, compiled: bool, role: str, **options: Any) -> list[np.ndarray]:
    variables = [tf.Variable(array) for array in arrays]
    reducer = GradientReducer(world.backend, reduction_options(**options))

    def reduce() -> list[tf.Tensor]:
        return reducer.reduce([v.read_value() for v in variables], [f"v{i}" for i in range(len(variables))], role=role)

    results = tf.function(reduce, autograph=False)() if compiled else reduce()
    return [result.numpy() for result in results]


def flat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays])


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-1", "gloo-4", extended=True)
def check_errors_stay_within_their_bound(world: World) -> None:
    for dtype in ("float32", "float64"):
        parts = [flat(values_of(rank, dtype)) for rank in range(world.size)]
        exact = sum(part.astype(np.longdouble) for part in parts)
        allowed = bound(world, parts)
        for wire in ("fp16", "bf16"):
            for op, factor in (("sum", 1), ("average", world.size)):
                for compiled in (False, True):
                    role = f"bound/{dtype}/{wire}/{op}"
                    results = reduced(
                        world, values_of(world.rank, dtype), compiled=compiled, role=role, op=op, compression=wire
                    )
                    assert [r.shape for r in results] == SHAPES
                    assert {str(r.dtype) for r in results} == {dtype}
                    share = np.max(np.abs(flat(results) - exact / factor) * factor / allowed[wire])
                    assert share <= 1.0, f"{role}: {share} of the bound"
                    # One rank sends nothing and rounds nothing; the others do use their bound.
                    assert share < 1e-2 if world.size == 1 else share > 0.3, f"{role}: {share} of the bound"
                    assert world.same_everywhere(flat(results).tobytes()), role


@worlds("mpirun-2", extended=True)
def check_groups_and_predivide_change_no_more_than_rounding(world: World) -> None:
    parts = [flat(values_of(rank, "float32")) for rank in range(world.size)]
    exact, allowed = sum(part.astype(np.float64) for part in parts), bound(world, parts)
    for number, options in enumerate([{"groups": 2}, {"groups": (("v0", "v3"),)}, {"gradient_predivide_factor": 2.0}]):
        for wire in ("fp16", "bf16"):
            results = reduced(
                world,
                values_of(world.rank, "float32"),
                compiled=True,
                role=f"options{number}/{wire}",
                op="sum",
                compression=wire,
                **options,
            )
            assert np.all(np.abs(flat(results) - exact) <= allowed[wire])


@worlds("mpirun-2", "gloo-2", "gloo-1", "gloo-4", extended=True)
def check_large_values_survive(world: World) -> None:
    """In half precision alone 1e30 is infinite, and so is the sum of two times 60000."""
    arrays = [np.full(5, 60000, "float32"), np.full(3, 1e30, "float32")]
    for groups in (0, 2):  # in one buffer 60000 is nothing beside 1e30
        for op, factor in (("average", 1), ("sum", world.size)):
            role = f"large/{groups}/{op}"
            small, large = reduced(world, arrays, compiled=True, role=role, op=op, compression="fp16", groups=groups)
            np.testing.assert_allclose(large, 1e30 * factor, rtol=2**-10)
            if groups:
                np.testing.assert_allclose(small, 60000 * factor, rtol=2**-10 if op == "sum" else 0)


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
def check_what_is_not_finite_reaches_every_rank(world: World) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for wire in ("fp16", "bf16"):
            array = np.arange(1, 9, dtype="float32")
            if world.rank == world.size - 1:
                array[5] = bad
            (result,) = reduced(
                world, [array], compiled=True, role=f"not_finite/{bad}/{wire}", op="average", compression=wire
            )
            np.testing.assert_array_equal(result[5], bad)
            np.testing.assert_array_equal(np.delete(result, 5), [1, 2, 3, 4, 5, 7, 8])


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
def check_one_scatter_and_one_gather_and_no_sum(world: World) -> None:
    reducer = GradientReducer(world.backend, reduction_options("sum", "bf16"))
    variables = [tf.Variable(tf.ones([3])), tf.Variable(tf.ones([4]))]

    @tf.function(autograph=False)
    def step() -> list[tf.Tensor]:
        return reducer.reduce([v.read_value() for v in variables], ["a", "b"], role="ops")

    kinds = sorted(op.type for op in step.get_concrete_function().graph.get_operations() if "Horovod" in op.type)
    assert kinds == (["HorovodAllreduce"] if world.size == 1 else ["HorovodAlltoall"] * 2), kinds


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
@grappler()
def check_equal_messages_are_not_merged_and_constants_not_folded(world: World) -> None:
    @tf.function(autograph=False)
    def exchange(x: tf.Tensor) -> list[tf.Tensor]:
        inputs = {"first": x, "second": x, "constant": tf.zeros([world.size]) + 3.0}
        return [world.backend.all_to_all(value, name=f"all_to_all/{name}") for name, value in inputs.items()]

    x = tf.range(2.0 * world.size) + 100.0 * world.rank
    left = optimized_collectives(exchange, x)
    assert len(set(left)) == (3 if world.size > 1 else len(left)), left
    expected = [[100.0 * rank + 2 * world.rank, 100.0 * rank + 2 * world.rank + 1] for rank in range(world.size)]
    for _ in range(2):
        first, second, constant = exchange(x)
        for result in (first, second):
            np.testing.assert_array_equal(result, np.ravel(expected))
        np.testing.assert_array_equal(constant, np.full(world.size, 3.0))


@worlds("mpirun-2", extended=True)
def check_tape_in_16_bits(world: World) -> None:
    variable = tf.Variable(tf.ones(3), name="in16bits")
    for wire in ("fp16", "bf16"):

        def gradient(wire: str = wire) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = float(world.rank + 1) * tf.reduce_sum(variable * tf.constant([1.0, 2.0, 4.0]))
            return hvdtrain.DistributedGradientTape(tape, compression=wire).gradient(loss, [variable])[0]

        for value in (gradient(), tf.function(gradient, autograph=False)()):
            np.testing.assert_array_equal(value, np.array([1, 2, 4]) * (world.size + 1) / 2)
