"""Which processors each rank gets, on machines as Linux describes them."""

import os

import pytest

from hvdtrain.runtime.devices import DevicePlan, Place, count_cores, divide, expand, plan_devices, read_topology

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
