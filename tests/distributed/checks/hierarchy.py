"""Sums inside each host first, then between the hosts: on one machine, whose ranks are given hosts by the test."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from checks import compression
from checks.parity import assert_parity
from world import TIMEOUT_S, World
from worlds import worlds

from hvdtrain.gradients.reduction import GradientReducer, reduction_options
from hvdtrain.runtime import collectives
from hvdtrain.runtime.collectives import TwoLevelSum
from hvdtrain.runtime.hierarchy import host_grid
from hvdtrain.runtime.hierarchy_choice import choose_hierarchy
from hvdtrain.runtime.world import host_groups

EVEN, IN_TURN, UNEVEN, THREE_HOSTS = "aabb", "abab", "aaab", "aabc"
SMALL = 16
"""Bytes from which sums take two levels here: the models of the tests are small."""


@contextmanager
def on_hosts(world: World, hosts: str) -> Iterator[World]:
    """Give each rank the host that its letter in `hosts` names, and sum by host inside the context."""
    group, usual = world.backend.group, collectives.TWO_LEVEL_BYTES
    grid = host_grid(group.ranks, hosts)
    assert grid is not None
    sets = {ranks: hvd.add_process_set(ranks) for ranks in grid.process_sets()}
    backend = copy.copy(world.backend)
    backend.group = replace(group, by_host=host_groups("dp", world.rank, grid, sets))
    backend.by_host, backend.fuses = TwoLevelSum(backend.group.by_host), False
    collectives.TWO_LEVEL_BYTES = SMALL
    try:
        yield replace(world, backend=backend)
    finally:
        collectives.TWO_LEVEL_BYTES = usual
        for process_set in sets.values():
            assert hvd.remove_process_set(process_set)


@worlds("gloo-4", "mpirun-4", extended=True)
def check_sums_of_every_dtype_on_hosts_of_any_shape(world: World) -> None:
    dtypes = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64, tf.uint8)
    for hosts in (EVEN, IN_TURN, UNEVEN, THREE_HOSTS):
        with on_hosts(world, hosts) as there:
            sums = partial(sums_of, there, dtypes)
            compiled = tf.function(partial(sums, f"{hosts}/compiled"), autograph=False)
            for total, dtype in zip([*compiled(), *sums(hosts)], dtypes * 2, strict=True):
                assert total.dtype == dtype
                expected = world.size * np.arange(33).reshape(3, 11) + sum(range(world.size))
                np.testing.assert_array_equal(tf.cast(total, tf.int64), expected, f"{hosts} {dtype.name}")


def sums_of(world: World, dtypes: Sequence[tf.DType], name: str) -> list[tf.Tensor]:
    mine = [tf.cast(tf.reshape(tf.range(33), [3, 11]) + world.rank, dtype) for dtype in dtypes]
    return [world.backend.all_reduce(x, name=f"{name}/{x.dtype.name}") for x in mine]


@worlds("gloo-4", "mpirun-4", extended=True)
def check_factors_groups_and_averages(world: World) -> None:
    with on_hosts(world, EVEN) as there:
        mine = tf.range(12.0) + world.rank
        mean = there.backend.all_reduce(mine, name="by_host/mean", op="average", prescale=2.0, postscale=4.0)
        np.testing.assert_allclose(mean, 8.0 * (np.arange(12.0) + (world.size - 1) / 2))
        first, second = there.backend.grouped_all_reduce([mine, mine[:5]], name="by_host/group", postscale=0.5)
        np.testing.assert_allclose(first, 0.5 * (world.size * np.arange(12.0) + sum(range(world.size))))
        np.testing.assert_allclose(second, first[:5])


@worlds("gloo-4", "mpirun-4", extended=True)
def check_a_slice_crosses_and_nothing_else(world: World) -> None:
    """All ranks at once exchange nothing, and each exchanges half of the gradients with the other host."""
    with on_hosts(world, EVEN) as there:
        reducer = GradientReducer(there.backend, reduction_options("sum"))
        variables = [tf.Variable(tf.ones([6, 4])), tf.Variable(tf.ones([8]))]

        @tf.function(autograph=False)
        def step() -> list[tf.Tensor]:
            return reducer.reduce([v.read_value() for v in variables], ["a", "b"], role="crossing")

        operations = step.get_concrete_function().graph.get_operations()
        sent = {op.type: op for op in operations if op.type.startswith("Horovod")}
        assert sorted(sent) == ["HorovodAllgather", "HorovodAllreduce", "HorovodAlltoall"]
        assert all(op.get_attr("process_set_id") != 0 for op in sent.values())
        slices = there.backend.by_host._local.group.ranks
        crossing = there.backend.by_host._crossing.group.process_set.process_set_id
        assert sent["HorovodAllreduce"].get_attr("process_set_id") == crossing
        assert sent["HorovodAllreduce"].inputs[0].shape == [32 // len(slices)]
        for result, variable in zip(step(), variables, strict=True):
            np.testing.assert_array_equal(result, np.full(variable.shape, world.size))


@worlds("gloo-4", "mpirun-4", extended=True)
def check_training_by_host_is_training_on_one(world: World) -> None:
    with on_hosts(world, EVEN) as there:
        assert_parity(there, "dense", "adam", "float64", backend=there.backend)
        assert_parity(there, "dense", "sgd", "float32", backend=there.backend, gradient_groups=2, accumulate=2)


@worlds("gloo-4", "mpirun-4", extended=True)
def check_training_on_uneven_hosts_is_training_on_one(world: World) -> None:
    with on_hosts(world, UNEVEN) as there:
        assert_parity(there, "embedding", "adam", "float64", backend=there.backend)
        assert_parity(there, "dense", "adam", "float32", backend=there.backend, zero=1)


@worlds("gloo-4", "mpirun-4", extended=True)
def check_16_bits_between_hosts_stay_within_their_bound(world: World) -> None:
    with on_hosts(world, EVEN) as there:
        compression.check_errors_stay_within_their_bound(there)


@worlds("gloo-4", "mpirun-4", extended=True)
def check_what_is_faster_is_chosen_alike_on_all_ranks(world: World) -> None:
    with on_hosts(world, EVEN) as there:
        opened = replace(world.session.world, hosts=tuple(EVEN), collectives={"dp": there.backend})
        control = world.session.control

        def chosen(choice: Any) -> tuple[bool, str]:
            found = choose_hierarchy(opened, choice, control, TIMEOUT_S)
            return found.collectives["dp"].by_host is not None, " ".join(found.remarks)

        assert chosen("never") == (True, "")  # no process sets are made then
        by_host, remark = chosen("always")
        assert by_host
        assert remark.startswith("note: gradients are summed inside each host first, then between the 2 hosts: as --hi")
        measured = chosen("auto")
        assert world.same_everywhere(repr(measured).encode())
        assert ("of the time of one ring" in measured[1]) == measured[0]
        assert ("times as long" in measured[1]) != measured[0]
