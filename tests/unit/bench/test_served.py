"""What a rank that leads can tell of those that serve it."""

import json
import mmap
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hvdtrain.bench.served import ServedProcesses
from hvdtrain.bench.timing import Usage, own_usage, peak_rss_mib, usage_of
from hvdtrain.config.errors import LaunchError

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


def test_a_process_reads_of_itself_what_others_read_of_it(busy):
    me = ServedProcesses(session([(host(), busy.pid)]))
    me._others = [os.getpid()]
    read, known = me.usage(), own_usage()
    assert read.user_s == pytest.approx(known.user_s, abs=0.1)
    assert read.system_s == pytest.approx(known.system_s, abs=0.1)
    assert read.page_faults == pytest.approx(known.page_faults, rel=0.05)
    assert me.peak_rss_mib() == [pytest.approx(peak_rss_mib(), rel=0.02)]


def test_page_faults_are_counted_when_memory_is_touched():
    before = usage_of(os.getpid())
    with mmap.mmap(-1, 64 * 256 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        mapped = usage_of(os.getpid())
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1
    touched = usage_of(os.getpid())
    assert mapped.page_faults - before.page_faults < 1000
    assert touched.since(mapped).page_faults >= 64 * 256


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
