"""What a rank that leads can tell of those that serve it."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hvdtrain.bench.served import ServedProcesses
from hvdtrain.bench.timing import peak_rss_mib, processor_seconds
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
    assert 0.28 <= served.processor_seconds() < 1.0, "the system counts in hundredths of a second"
    (peak,) = served.peak_rss_mib()
    assert 64 < peak < 64 + 64, "what it once held, though it gave it back"


def test_a_process_reads_of_itself_what_others_read_of_it(busy):
    me = ServedProcesses(session([(host(), busy.pid)]))
    me._others = [type(me._others[0])(os.getpid())]
    assert me.processor_seconds() == pytest.approx(processor_seconds(), abs=0.1)
    assert me.peak_rss_mib() == [pytest.approx(peak_rss_mib(), rel=0.02)]


def test_a_rank_that_serves_tells_who_it_is_and_measures_nothing(busy):
    served = ServedProcesses(session([(host(), busy.pid)], serves=True))
    assert (served.processor_seconds(), served.peak_rss_mib()) == (0, [])


@pytest.mark.parametrize("strategy", [None, SimpleNamespace(roles=None)])
def test_where_nobody_leads_every_rank_measures_itself(strategy):
    served = ServedProcesses(SimpleNamespace(strategy=strategy))
    assert (served.processor_seconds(), served.peak_rss_mib()) == (0, [])


def test_processes_of_another_machine_are_refused():
    with pytest.raises(LaunchError, match=r"on one machine only\. Received: ranks on .*elsewhere"):
        ServedProcesses(session([("elsewhere", 1)]))
