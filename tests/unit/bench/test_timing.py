"""Time, memory and bytes of processes, sides in turn, and what collectives are given and return."""

import json
import mmap
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from hvdtrain.backends.protocol import gather
from hvdtrain.bench.callers import calls, expected, input_of
from hvdtrain.bench.timing import (
    ServedProcesses,
    Usage,
    forget_peak,
    in_turn,
    peak_rss_mib,
    process_settings,
    usage_figures,
    usage_of,
)
from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.tuning import LARGE_MESSAGES
from tests.unit.gathering import on_ranks

BUSY = """
import time
held = bytearray(b"1") * (64 << 20)
while time.process_time() < 0.3:
    pass
del held
print("done", flush=True)
time.sleep(60)
"""


def session(others, *, serves=False):
    """A session of a rank whose channel tells of itself and of (host, pid)s."""
    channel = SimpleNamespace(exchange=lambda mine, timeout: [mine, *(json.dumps(one).encode() for one in others)])
    return SimpleNamespace(link=SimpleNamespace(control=channel), strategy=SimpleNamespace(roles=1), serves=serves)


def host():
    return os.uname().nodename


@pytest.fixture
def busy():
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "done\n"
    yield process
    process.kill()
    process.wait()


def test_time_and_memory_are_those_of_the_other_processes(busy):
    served = ServedProcesses(session([(host(), busy.pid)]))
    used = served.usage()
    assert 0.28 <= used.user_s + used.system_s < 1.0, "the system counts in hundredths of a second"
    assert used.page_faults >= (64 << 20) // mmap.PAGESIZE
    (peak,) = served.peak_rss_mib()
    assert 64 < peak < 64 + 64, "what it once held, though it gave it back"


def test_a_program_whose_name_has_spaces_and_parentheses_is_read(tmp_path):
    program = tmp_path / "a (b) c"
    program.symlink_to(sys.executable)
    process = subprocess.Popen([program, "-Sc", "print(flush=True); input()"], stdin=-1, stdout=-1)
    assert process.stdout.readline() == b"\n"
    assert usage_of(process.pid).page_faults > 100
    process.communicate(b"\n")


def test_a_rank_that_serves_tells_who_it_is_and_measures_nothing(busy):
    served = ServedProcesses(session([(host(), busy.pid)], serves=True))
    assert (served.usage(), served.peak_rss_mib()) == (Usage(), [])


@pytest.mark.parametrize("strategy", [None, SimpleNamespace(roles=None)])
def test_where_nobody_leads_every_rank_measures_itself(strategy):
    served = ServedProcesses(SimpleNamespace(strategy=strategy))
    assert (served.usage(), served.peak_rss_mib()) == (Usage(), [])


def test_processes_of_another_machine_are_refused():
    with pytest.raises(LaunchError, match=r"on one machine only\. Received: ranks on .*elsewhere"):
        ServedProcesses(session([("elsewhere", 1)]))


def test_a_peak_can_be_forgotten():
    held = bytearray(b"1") * (256 << 20)
    with_it = peak_rss_mib()
    del held
    forget_peak()
    assert peak_rss_mib() < with_it - 200


def test_figures_of_all_processes_are_per_step():
    ranks = [Usage(2.0, 1.0, 700), Usage(3.0, 2.0, 100)]
    assert usage_figures(ranks, [500, 400.5], 4) == {
        "cpu_s": 2.0,
        "kernel_share": 0.375,
        "page_faults": 200.0,
        "peak_rss_mib": [500.0, 400.5],
    }


def test_sides_take_turns_and_the_slowest_rank_counts():
    def on_rank(backend):
        order = []

        def side(name, times):
            values = iter(times)

            def call():
                order.append(name)
                return next(values)

            return call

        mine = {"a": side("a", [99.0, 1.0, 4.0]), "b": side("b", [99.0, 7.0 - backend.index, 5.0 + backend.index])}
        return order, in_turn(mine, 2, partial(gather, backend))

    for order, times in on_ranks(2, on_rank):
        assert order == ["a", "b"] * 3
        assert times == {"a": [1.0, 4.0], "b": [7.0, 6.0]}, "the first round is not counted"


def test_settings_name_a_file_of_ours_without_the_folder_it_lies_in():
    told = process_settings(1, LARGE_MESSAGES | {"HOROVOD_CYCLE_TIME": "3"})
    assert told["OMPI_MCA_coll_tuned_dynamic_rules_filename"] == "hvdtrain/runtime/openmpi-allreduce.conf"
    assert told["HOROVOD_CYCLE_TIME"] == "3"
    theirs = {"OMPI_MCA_coll_tuned_dynamic_rules_filename": "/etc/rules.conf"}
    assert process_settings(1, theirs)["OMPI_MCA_coll_tuned_dynamic_rules_filename"] == "/etc/rules.conf"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_given_comes_out_as_the_collective_says(ranks):
    parts = {name: [input_of(name, 1000, rank, ranks) for rank in range(ranks)] for name in ("allreduce", "allgather")}
    assert (sum(parts["allreduce"]) == expected("allreduce", 1000, ranks)).all()
    assert [v for part in parts["allgather"] for v in part] == expected("allgather", 1000, ranks).tolist()
    assert len(expected("reducescatter", 1000, ranks)) * ranks == len(input_of("reducescatter", 1000, 0, ranks))
    assert (input_of("broadcast", 1000, 0, ranks) == expected("broadcast", 1000, ranks)).all()


def test_small_sizes_are_called_more_often():
    assert [calls(size) for size in (1000, 16_000_000, 400_000_000)] == [100, 16, 5]
