"""Each operation with a rule: on slices of random samples, its value, gradient and second gradient are the whole's."""

import traceback
from dataclasses import replace

import numpy as np
import tensorflow as tf

from hvdtrain.data.batch import split_bounds
from hvdtrain.partition.step import open_rows
from hvdtrain.partition.table import RULES
from tests.distributed.keras_operations import OPERATIONS, OVER_BATCH
from tests.distributed.partition_cases import CASES, Case, computed, values_for
from tests.distributed.world import World, computing_in
from tests.distributed.worlds import worlds
from tests.distributed.zoo.operations import FAILS, OnRank, kinds_on_page

UNTRIED = {"NoOp", "Assert", "Rank", "ResourceGather"} | {
    "MaxPoolGradGrad",
    "OnesLike",
    "SoftplusGrad",
}
"""Operations without samples, of variables, or of second gradients."""


def _in_one_process(case: Case, values: list[np.ndarray], met: set[str]) -> list[np.ndarray]:
    rows = len(case.rows)
    function = tf.function(
        lambda *tensors: computed(case, *map(open_rows, tensors[:rows]), *tensors[rows:]), autograph=False
    )
    compiled = function.get_concrete_function(*map(tf.constant, values))
    met.update(op.type for op in compiled.graph.get_operations())
    return [each.numpy() for each in compiled(*map(tf.constant, values))]


def _on_this_rank(world: World, case: Case, values: list[np.ndarray]) -> tuple[list[np.ndarray], OnRank]:
    first, last = split_bounds(len(values[0]), world.backend.index, world.backend.size)
    count = len(case.rows)
    step = OnRank(world.backend, case)
    given = [tf.constant(each[first:last]) for each in values[:count]] + list(map(tf.constant, values[count:]))
    return [each.numpy() for each in tf.function(step.__call__, autograph=False)(*given)], step


def _failure(world: World, case: Case, samples: int, met: set[str], *, gathers: bool = True) -> str | None:
    """Return what is wrong with a case.

    Args:
        gathers: whether to compare what is gathered, too.
    """
    values = values_for(case, samples)
    try:
        expected = _in_one_process(case, values, met)
        found, step = _on_this_rank(world, case, values)
        assert len(found) == len(expected)
        digits = 1e-5 if any(each.dtype == np.float32 for each in expected) else 1e-9
        for mine, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, right, rtol=digits, atol=digits)
        gathered = [each for each in (*step.forward, *step.backward) if each.gathers]
        assert not gathers or case.order > 1 or bool(gathered) == case.gathers, gathered
    except Exception:
        return traceback.format_exc(limit=-3)[-600:]
    return None


def _failures(world: World, samples: int, *, order: int, each: int = 1) -> tuple[dict[str, str], set[str]]:
    met: set[str] = set()
    cases = [replace(case, order=min(case.order, order)) for case in CASES[::each]]
    found = {f"{number}, line {case.line}": _failure(world, case, samples, met) for number, case in enumerate(cases)}
    return {name: why for name, why in found.items() if why is not None}, met


def check_a_third_of_the_operations_has_the_values_of_one_process(world: World) -> None:
    failures, _ = _failures(world, samples=5, order=1, each=3)
    assert not failures, "\n\n".join(f"{name}: {why}" for name, why in failures.items())


@worlds("mpirun-2", extended=True, why="all operations, each by itself")
def check_operations_have_the_values_of_one_process(world: World) -> None:
    failures, met = _failures(world, samples=5, order=1)
    assert not failures, "\n\n".join(f"{name}: {why}" for name, why in failures.items())
    assert set(RULES) - met - UNTRIED == set(), "rules that no case tries"


@worlds("gloo-4", extended=True, why="three hundred functions, traced with two gradients")
def check_second_gradients_have_the_values_of_one_process(world: World) -> None:
    failures, _ = _failures(world, samples=3, order=2)  # one of the ranks has none
    assert not failures, "\n\n".join(f"{name}: {why}" for name, why in failures.items())


@worlds("gloo-4", extended=True, why="all functions of keras.ops and keras.random")
def check_functions_of_keras_have_the_values_of_one_process(world: World) -> None:
    failures = {}
    samples = 3  # one of the ranks has none
    with computing_in("float64"):
        for cases in (OPERATIONS, OVER_BATCH):
            raising = kinds_on_page(FAILS, over_batch=cases is OVER_BATCH)
            for name, case in cases.items():
                if name not in raising:
                    failures[name] = _failure(world, case, samples=samples, met=set(), gathers=False)
    wrong = {name: why for name, why in failures.items() if why is not None}
    assert not wrong, "\n\n".join(f"{name}: {why}" for name, why in wrong.items())
