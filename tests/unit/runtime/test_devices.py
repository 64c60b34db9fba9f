import json
import os
from dataclasses import replace

import pytest

from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.devices import DevicePlan, gather_masks, place_process, plan_devices
from hvdtrain.runtime.launchers import detect_environment


def plans(masks, **options):
    return [plan_devices(masks, local_rank, **options) for local_rank in range(len(masks))]


def test_one_rank_keeps_what_it_may_use():
    assert plan_devices([[3, 1, 2]], 0) == DevicePlan((1, 2, 3), threads=3, pinned=False)


def test_ranks_that_share_a_set_get_a_block_each():
    assert plans([range(8)] * 2) == [
        DevicePlan((0, 1, 2, 3), threads=4, pinned=True),
        DevicePlan((4, 5, 6, 7), threads=4, pinned=True),
    ]


def test_the_same_set_in_another_order_is_shared():
    assert [plan.cores for plan in plans([[0, 1], [1, 0]])] == [(0,), (1,)]


@pytest.mark.parametrize(("cores", "ranks"), [(8, 3), (7, 2), (4, 4), (5, 3)])
def test_blocks_are_equal_and_do_not_overlap(cores, ranks):
    blocks = [plan.cores for plan in plans([range(10, 10 + cores)] * ranks)]
    assert {len(block) for block in blocks} == {cores // ranks}
    taken = [core for block in blocks for core in block]
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(range(10, 10 + cores))


def test_more_ranks_than_cores_get_one_thread_and_no_core_of_their_own():
    assert plans([[0, 1]] * 4) == [DevicePlan((0, 1), threads=1, pinned=False)] * 4


def test_a_launcher_that_gave_out_cores_is_followed():
    masks = [[0, 1], [2, 3], [4]]
    assert plans(masks) == [
        DevicePlan((0, 1), threads=2, pinned=True),
        DevicePlan((2, 3), threads=2, pinned=True),
        DevicePlan((4,), threads=1, pinned=True),
    ]


def test_without_pinning_the_cores_are_divided_into_threads_only():
    assert plans([range(8)] * 2, pin=False) == [DevicePlan(tuple(range(8)), threads=4, pinned=False)] * 2
    assert plans([range(2)] * 4, pin=False) == [DevicePlan((0, 1), threads=1, pinned=False)] * 4


@pytest.mark.parametrize(
    ("masks", "pin"),
    [([range(8)] * 2, True), ([range(8)] * 2, False), ([[0]] * 2, True), ([[0], [1]], True), ([[0]], True)],
)
def test_asked_for_threads_are_taken_as_they_are(masks, pin):
    wanted = plans(masks, threads=3, pin=pin)
    assert {plan.threads for plan in wanted} == {3}
    assert [plan.cores for plan in wanted] == [plan.cores for plan in plans(masks, pin=pin)]


class Job:
    """A channel on which the other ranks have spoken already."""

    def __init__(self, *others):
        self.others = [json.dumps(fact).encode() for fact in others]

    def exchange(self, payload, *, timeout):
        return [*self.others, payload]


def fact(host, local_rank, cores):
    return {"host": host, "local_rank": local_rank, "cores": cores}


@pytest.fixture
def here():
    return replace(detect_environment({}), hostname="a", local_rank=1, local_size=2, rank=2, size=3)


@pytest.fixture
def bound(monkeypatch):
    """This process may use cores 4 to 7; what it is bound to is written down, not done."""
    calls = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: calls.append((pid, tuple(cores))))
    return calls


def test_masks_are_those_of_this_machine_by_local_rank(here, bound):
    job = Job(fact("b", 1, [0]), fact("a", 2, [3, 9]), fact("a", 0, [1, 2]))
    assert gather_masks(job, here, timeout=1) == [[1, 2], [4, 5, 6, 7], [3, 9]]


def test_the_process_is_bound_to_its_own_cores(here, bound):
    plan = place_process(Job(fact("a", 0, [4, 5, 6, 7])), here, RuntimeConfig(), timeout=1)
    assert plan == DevicePlan((6, 7), threads=2, pinned=True)
    assert bound == [(0, (6, 7))]


@pytest.mark.parametrize("config", [RuntimeConfig(pin=False), RuntimeConfig(pin=False, threads=9)])
def test_the_process_stays_where_it_is_without_pinning(here, bound, config):
    plan = place_process(Job(fact("a", 0, [4, 5, 6, 7])), here, config, timeout=1)
    assert (plan.cores, plan.threads, bound) == ((4, 5, 6, 7), config.threads or 2, [])
