"""Each operation with a rule: on slices of random samples, its value, gradient and second gradient are the whole's."""

import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.batch import split_bounds
from hvdtrain.partition.kinds import Rows
from hvdtrain.partition.partition import Partition
from hvdtrain.partition.step import open_rows, partition_of, whole_nest
from hvdtrain.partition.table import RULES
from hvdtrain.partition.tracing import traced
from tests.distributed.partition_cases import CASES, Case, computed, values_for
from tests.distributed.world import World
from tests.distributed.worlds import worlds

UNTRIED = {"NoOp", "Assert", "Rank", "ResourceGather"} | {
    "MaxPool3DGradGrad",
    "MaxPoolGradGrad",
    "OnesLike",
    "SoftplusGrad",
}
"""Operations without samples, of variables, or of second gradients."""


def _in_one_process(case: Case, values: list[np.ndarray], met: set[str]) -> list[np.ndarray]:
    function = tf.function(lambda *tensors: computed(case, *tensors), autograph=False)
    compiled = function.get_concrete_function(*map(tf.constant, values))
    met.update(op.type for op in compiled.graph.get_operations())
    return [each.numpy() for each in compiled(*map(tf.constant, values))]


def _on_this_rank(world: World, case: Case, values: list[np.ndarray]) -> tuple[list[np.ndarray], Partition]:
    collectives = world.backend
    first, last = split_bounds(len(values[0]), collectives.index, collectives.size)
    count = len(case.rows)
    made: list[Partition] = []

    def run(*tensors: Any) -> Any:
        opened = [open_rows(each) for each in tensors[:count]]
        partition = partition_of(collectives, opened[0])
        made.append(partition)
        for each in opened:
            partition.mark(each, Rows())
        with traced(partition):
            found = computed(case, *opened, *tensors[count:])
            partition.cause = "results"
            return whole_nest(partition, found)

    given = [tf.constant(each[first:last]) for each in values[:count]] + list(map(tf.constant, values[count:]))
    return [each.numpy() for each in tf.function(run, autograph=False)(*given)], made[-1]


def _failure(world: World, case: Case, samples: int, met: set[str]) -> str | None:
    """Return what is wrong with a case."""
    values = values_for(case, samples)
    try:
        expected = _in_one_process(case, values, met)
        found, partition = _on_this_rank(world, case, values)
        assert len(found) == len(expected)
        for mine, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, right, rtol=1e-9, atol=1e-9)
        gathered = [each for each in partition.fetches if each.gathers and each.cause != "results"]
        assert case.order > 1 or bool(gathered) == case.gathers, gathered
    except Exception:
        return traceback.format_exc(limit=-3)[-600:]
    return None


def _failures(world: World, samples: int, *, order: int) -> tuple[dict[str, str], set[str]]:
    met: set[str] = set()
    cases = [replace(case, order=min(case.order, order)) for case in CASES]
    found = {f"{number}, line {case.line}": _failure(world, case, samples, met) for number, case in enumerate(cases)}
    return {name: why for name, why in found.items() if why is not None}, met


@worlds("mpirun-2", why="all operations, each by itself")
def check_operations_have_the_values_of_one_process(world: World) -> None:
    failures, met = _failures(world, samples=5, order=1)
    assert not failures, "\n\n".join(f"{name}: {why}" for name, why in failures.items())
    assert set(RULES) - met - UNTRIED == set(), "rules that no case tries"


@worlds("mpirun-2", "gloo-4", extended=True, why="three hundred functions, traced with two gradients")
def check_second_gradients_have_the_values_of_one_process(world: World) -> None:
    failures, _ = _failures(world, samples=3, order=2)  # of four ranks, one has no sample
    assert not failures, "\n\n".join(f"{name}: {why}" for name, why in failures.items())
