"""Which cores and GPUs each rank gets, on machines as Linux and the driver describe them."""

import json
import os
import subprocess
import types
from dataclasses import replace

import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.devices import (
    DevicePlan,
    Place,
    RankGpus,
    agree_on_gpu,
    choose_gpus,
    count_cores,
    divide,
    driver_names,
    expand,
    gather_masks,
    place_process,
    plan_devices,
    read_topology,
    visible_gpus,
)
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


MACHINES = {
    # "processor core socket node" of `lscpu -p=CPU,CORE,SOCKET,NODE`, as ranges
    "one socket": [(cpu, cpu, 0, 0) for cpu in range(8)],
    "one socket with threads": [(cpu, cpu % 4, 0, 0) for cpu in range(8)],
    "two Xeons": [(cpu, cpu % 16, cpu % 16 // 8, cpu % 16 // 8) for cpu in range(32)],
    "two Xeons, numbered in turn": [(cpu, cpu % 16, cpu % 2, cpu % 2) for cpu in range(32)],
    "EPYC 7742, NPS4": [(cpu, cpu % 64, 0, cpu % 64 // 16) for cpu in range(128)],
    "two EPYC 7543, NPS1": [(cpu, cpu % 64, cpu % 64 // 32, cpu % 64 // 32) for cpu in range(128)],
}


@pytest.fixture
def sysfs(tmp_path):
    """Write a machine down as /sys/devices/system does."""

    def write(machine):
        rows = MACHINES[machine]
        for cpu, core, socket, _ in rows:
            folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            siblings = [str(other) for other, its_core, *_ in rows if its_core == core]
            (folder / "thread_siblings_list").write_text(",".join(siblings) + "\n")
            (folder / "physical_package_id").write_text(f"{socket}\n")
        for node in {row[3] for row in rows}:
            folder = tmp_path / "node" / f"node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(",".join(str(cpu) for cpu, *_, of in rows if of == node) + "\n")
        return tmp_path

    return write


def blocks(root, processors, ranks):
    return divide(processors, ranks, read_topology(processors, root))


def nodes_of(block, machine):
    return {node for cpu, _, _, node in MACHINES[machine] if cpu in block}


def cores_of(block, machine):
    return {core for cpu, core, *_ in MACHINES[machine] if cpu in block}


def test_two_sockets_of_eight_cores_and_four_ranks(sysfs):
    assert blocks(sysfs("two Xeons"), range(32), 4) == [
        (0, 1, 2, 3, 16, 17, 18, 19),
        (4, 5, 6, 7, 20, 21, 22, 23),
        (8, 9, 10, 11, 24, 25, 26, 27),
        (12, 13, 14, 15, 28, 29, 30, 31),
    ]


def test_sockets_whose_processors_are_numbered_in_turn(sysfs):
    first, second = blocks(sysfs("two Xeons, numbered in turn"), range(32), 2)
    assert first == tuple(range(0, 32, 2))
    assert second == tuple(range(1, 32, 2))


@pytest.mark.parametrize(
    ("machine", "ranks"),
    [
        *(("one socket", ranks) for ranks in (1, 2, 3, 4, 8)),
        *(("one socket with threads", ranks) for ranks in (2, 3, 4)),
        *(("two Xeons", ranks) for ranks in (2, 4, 6, 8, 16)),
        *(("EPYC 7742, NPS4", ranks) for ranks in (4, 8, 12, 16, 64)),
        *(("two EPYC 7543, NPS1", ranks) for ranks in (2, 4, 6, 8)),
    ],
)
def test_each_rank_gets_whole_cores_of_one_node_and_as_many_as_others(sysfs, machine, ranks):
    rows = MACHINES[machine]
    found = blocks(sysfs(machine), [row[0] for row in rows], ranks)
    cores = [cores_of(block, machine) for block in found]
    assert {len(each) for each in cores} == {len({row[1] for row in rows}) // ranks}
    assert sum(map(len, cores)) == len(set().union(*cores))
    assert all(len(nodes_of(block, machine)) == 1 for block in found)
    threads = len(rows) // len({row[1] for row in rows})
    assert [len(block) for block in found] == [len(its) * threads for its in cores]


def test_ranks_of_more_than_a_node_get_neighbouring_nodes(sysfs):
    first, second = blocks(sysfs("EPYC 7742, NPS4"), range(128), 2)
    assert nodes_of(first, "EPYC 7742, NPS4") == {0, 1}
    assert nodes_of(second, "EPYC 7742, NPS4") == {2, 3}


def test_three_ranks_on_two_nodes_use_every_core_that_divides(sysfs):
    found = blocks(sysfs("two Xeons"), range(32), 3)
    assert [len(block) for block in found] == [10, 10, 10]
    assert len(nodes_of(found[0], "two Xeons")) == len(nodes_of(found[2], "two Xeons")) == 1


def test_the_cpuset_of_a_job_with_uneven_nodes(sysfs):
    """Slurm gave 5 cores of socket 0 and 3 of socket 1, with both of their threads."""
    given = [*range(3, 8), *range(19, 24), *range(8, 11), *range(24, 27)]
    found = blocks(sysfs("two Xeons"), given, 4)
    assert [cores_of(block, "two Xeons") for block in found] == [{3, 4}, {5, 6}, {7, 8}, {9, 10}]
    assert set().union(*found) == set(given)


def test_more_ranks_than_cores_share_them_by_threads(sysfs):
    found = blocks(sysfs("one socket with threads"), range(8), 8)
    assert sorted(found) == [(cpu,) for cpu in range(8)]


def test_more_ranks_than_processors_get_none(sysfs):
    assert blocks(sysfs("one socket"), range(8), 9) == [()] * 9


def test_a_machine_that_describes_nothing_counts_processors(tmp_path):
    assert read_topology([3, 5], tmp_path) == {3: Place(0, 0, 3), 5: Place(0, 0, 5)}


def test_this_machine_has_cores():
    assert 1 <= count_cores(os.sched_getaffinity(0)) <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8,10-11\n", [0, 1, 2, 3, 8, 10, 11]), ("7", [7]), ("", [])])
def test_lists_of_processors(text, numbers):
    assert expand(text) == numbers


def test_ranks_that_a_launcher_bound_to_sockets_divide_each_among_themselves(sysfs):
    """`mpirun --bind-to socket`: two ranks share the processors of a socket."""
    topology = read_topology(range(32), sysfs("two Xeons"))
    sockets = [[*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]]
    masks = [sockets[0], sockets[0], sockets[1], sockets[1]]
    plans = [plan_devices(masks, rank, topology=topology) for rank in range(4)]
    assert plans[1] == DevicePlan((4, 5, 6, 7, 20, 21, 22, 23), threads=8, pinned=True)
    assert len(set().union(*(plan.cores for plan in plans))) == 32


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (4.0, 2), (0.5, 1), (100.0, 8)])
def test_no_more_threads_than_the_control_group_has_time_for(quota, threads):
    masks = [list(range(16))] * 2
    assert plan_devices(masks, 1, quota=quota).threads == threads
    assert plan_devices(masks[:1], 0, quota=quota).threads == (16 if threads == 8 else max(1, int(quota)))


def ranks(*visible, host="a"):
    return [RankGpus(host, tuple(names)) for names in visible]


def test_ranks_that_see_all_gpus_take_them_by_local_rank():
    assert choose_gpus(ranks("ABCD", "ABCD", "ABCD")) == ["A", "B", "C"]


def test_a_scheduler_that_shows_each_rank_its_own_is_followed():
    assert choose_gpus(ranks("A", "B", "C", "D")) == ["A", "B", "C", "D"]


def test_hosts_have_gpus_of_their_own():
    assert choose_gpus([*ranks("AB", "AB"), *ranks("AB", "AB", host="b")]) == ["A", "B", "A", "B"]


def test_a_rank_that_sees_fewer_comes_first():
    assert choose_gpus(ranks("AB", "A")) == ["B", "A"]


def test_a_rank_of_an_earlier_world_keeps_its_gpu():
    """Rank 0 of the first world, with GPU A, was lost; the survivor has B, and the new rank takes A."""
    assert choose_gpus([RankGpus("a", ("A", "B"), taken="B"), RankGpus("a", ("A", "B"))]) == ["B", "A"]


def test_no_gpu_anywhere():
    assert choose_gpus(ranks("", "")) == [None, None]


@pytest.mark.parametrize("visible", [("AB", "AB", "AB"), ("A", "A", "A"), ("A", "B", "B")])
def test_fewer_gpus_than_ranks_are_refused(visible):
    with pytest.raises(LaunchError, match=r"Each rank takes a GPU.*Received: 3 ranks on a, which see [12] of its GPUs"):
        choose_gpus(ranks(*visible))


def test_some_ranks_without_a_gpu_are_refused():
    with pytest.raises(LaunchError, match=r"Received: ranks 1-2 on b without a GPU"):
        choose_gpus([*ranks("A"), *ranks("", "", host="b")])
    assert choose_gpus([*ranks("A"), *ranks("", host="b")], mixed=True) == ["A", None]


class GpuJob:
    """A channel on which another rank of this host has spoken."""

    def __init__(self, visible):
        self.other = json.dumps({"host": "a", "visible": visible, "taken": None}).encode()

    def exchange(self, payload, *, timeout):
        return [self.other, payload]


@pytest.fixture
def second(monkeypatch):
    """This process is rank 1 of 2 on host a, whose TensorFlow lists two GPUs and whose driver names none."""
    import tensorflow as tf

    from tests.unit.launcher_environments import OPEN_MPI_4

    gpus = [types.SimpleNamespace(name=f"GPU:{number}") for number in range(2)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr("hvdtrain.runtime.devices.driver_names", lambda: ())
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    return detect_environment(OPEN_MPI_4)


def test_all_ranks_agree_on_the_index_of_each(second, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert agree_on_gpu(GpuJob(["#0", "#1"]), second, visible_gpus("a"), timeout=1) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert agree_on_gpu(GpuJob(["0,1#0", "0,1#1"]), second, visible_gpus("a"), timeout=1) == 0


def test_a_machine_without_a_driver_names_no_gpu():
    assert driver_names("libhvdtrain-no-such-driver.so") == ()


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = 7 + index; return 0; }
int cuDeviceGetUuid(unsigned char *name, int device) { memset(name, device, 16); return 0; }
"""


def test_the_driver_names_gpus_by_their_uuids(tmp_path):
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so"
    source.write_text(DRIVER)
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, source], check=True)
    assert driver_names(str(library)) == ("07" * 16, "08" * 16)
