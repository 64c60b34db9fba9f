"""The hosts that the tests of clusters and the benchmark of a slow link run on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.awake import awake_seconds
from tests.clusters.namespaces import AUTOGROUP, NoHosts, address, hosts

KIB = 1024
DOWNLOAD = ["sh", "-c", f"ssh host2 'head -c {4096 * KIB} /dev/zero' | wc -c"]
pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("hosts")]  # which each take a core for some time


@pytest.fixture(scope="module")
def two():
    try:
        with hosts(2) as made:
            yield made
    except NoHosts as why:
        pytest.skip(str(why))


def test_each_host_has_its_own_name_address_files_and_processes(two):
    (two.disk(2) / "mine").write_text("of host2")
    assert two.exec(1, ["hostname"]).stdout == "host1\n"
    seen = two.exec(1, ["ssh", "host2", "hostname; pwd; cat mine; echo; ls /dev/shm; ip -4 -o addr"]).stdout
    assert seen.splitlines()[:3] == ["host2", str(two.home), "of host2"]
    assert f"{address(2)}/24" in seen
    assert two.exec(1, ["ls"]).stdout == "tmp\n"
    assert two.processes(1) == two.processes(2) == []


def test_a_cable_that_is_shaped_is_as_slow_as_asked(two):
    assert two.exec(1, DOWNLOAD).stdout.split() == [str(4096 * KIB)]
    two.shape("16mbit")
    begun = time.monotonic()
    two.exec(1, DOWNLOAD)
    taken = time.monotonic() - begun
    two.shape(None)
    assert taken > 0.9 * (4096 - 512) * KIB * 8 / 16e6  # the first half of a megabyte is a burst


def test_a_run_that_is_killed_leaves_nothing_behind(two):
    words = [sys.executable, "-m", "tests.clusters.namespaces", "1", "--", "sh", "-c", "pwd; echo $$; exec sleep 600"]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout is not None
    folder = Path(run.stdout.readline().strip()).parent
    assert folder.is_dir()
    run.stdout.readline()
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait(60) == -signal.SIGKILL
    assert run.stdout.read() == ""  # all that held the pipe have ended, the sleep as well
    limit = awake_seconds() + 60
    while folder.exists():
        assert awake_seconds() < limit
        time.sleep(0.1)


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="the kernel has no groups of sessions (CONFIG_SCHEDAUTOGROUP)")
def test_the_cores_are_shared_out_by_processes_as_long_as_there_are_hosts(two):
    AUTOGROUP.write_text("1")
    try:
        with hosts(1):
            assert AUTOGROUP.read_text() == "0\n"
        assert AUTOGROUP.read_text() == "1\n"
    finally:
        AUTOGROUP.write_text("0")  # as it has to be for those of this module
