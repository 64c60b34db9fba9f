"""Sums and gathered tensors of ranks on one host, in memory that they share."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.launching import Job, launched
from tests.unit.threaded_ranks import start_server, variables

pytest.importorskip("horovod", reason="Horovod is not installed")

SUMS = """
import os, sys
import numpy as np
import horovod.tensorflow as hvd
import tensorflow as tf
exec(sys.argv[2])
hvd.init()
rank, size = hvd.rank(), hvd.size()
hvd.start_timeline(sys.argv[1])

def values(dtype, count, of):
    return ((np.arange(count) * 7 + of * 13) % 101 - 50).astype(dtype)

def summed(dtype, count, scale=1):
    # Added in the order of the ranks, and scaled at the end.
    total = values(dtype, count, 0)
    for of in range(1, size):
        total = total + values(dtype, count, of)
    return (total * np.asarray(scale, dtype)).astype(dtype)

for dtype in ("float64", "float32", "int32", "int64", "float16"):
    for count in (1, 1000, 131_072, 300_001):
        mine, name = tf.constant(values(dtype, count, rank)), f"{dtype}-{count}"
        np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum, name=name), summed(dtype, count))
        one, other = hvd.grouped_allreduce([mine, mine + 1], op=hvd.Sum)
        np.testing.assert_array_equal(one, summed(dtype, count))
        np.testing.assert_array_equal(other, summed(dtype, count) + size)
        if dtype in ("float32", "float64"):
            average = hvd.allreduce(mine, op=hvd.Average)
            np.testing.assert_array_equal(average, summed(dtype, count, 1 / size))
            scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
            np.testing.assert_array_equal(scaled, summed(dtype, count, 1.5))
np.testing.assert_array_equal(hvd.allreduce(tf.constant([rank]), op=hvd.Max), [size - 1])

# Between sums, which use the same memory.
for number, rows in enumerate([(0, 0, 0), (1, 0, 2), (3, 70_000, 1), (0, 0, 150_001), (5, 5, 5)]):
    for dtype in ("float32", "bool", "uint8", "float16", "int64"):
        for columns in ((), (3,), (2, 5)):
            def rows_of(of, more=0):
                shape = (rows[of], *columns)
                return tf.constant(values(dtype, int(np.prod(shape)) + more, of + number)[more:].reshape(shape))
            everyone = hvd.allgather(rows_of(rank))
            np.testing.assert_array_equal(everyone, tf.concat([rows_of(of) for of in range(size)], 0))
            for more, each in enumerate(hvd.grouped_allgather([rows_of(rank), rows_of(rank, 1)])):
                np.testing.assert_array_equal(each, tf.concat([rows_of(of, more) for of in range(size)], 0))
        np.testing.assert_array_equal(hvd.allreduce(tf.ones(140_000)), np.ones(140_000))

def of_some(ranks):
    some = hvd.add_process_set(ranks)
    if some.included():
        total = hvd.allreduce(tf.fill([70_000], rank), op=hvd.Sum, process_set=some)
        np.testing.assert_array_equal(total, np.full(70_000, sum(ranks)))
        everyone = hvd.allgather(tf.fill([rank + 1], rank), process_set=some)
        np.testing.assert_array_equal(everyone, np.repeat(ranks, np.add(ranks, 1)))
    hvd.remove_process_set(some)

if size > 2:
    for ranks in ([0, 2], [1, 2], [0, 2]):
        of_some(ranks)
# The last rank has no more, and counts as zeros.
if rank < size - 1:
    x = hvd.allreduce(tf.ones(70_000), op=hvd.Sum)
    np.testing.assert_array_equal(x, np.full(70_000, size - 1))
hvd.join()
hvd.stop_timeline()
hvd.shutdown()
if "OMPI_COMM_WORLD_RANK" not in os.environ:  # MPI begins once
    hvd.init()
    assert int(hvd.allreduce(tf.constant(rank + 1), op=hvd.Sum)) == size * (size + 1) // 2
    hvd.shutdown()
print("as they have to be", flush=True)
"""
ONE_ENDS = """
import os, signal, sys, threading
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
x = tf.ones(30_000_000)
hvd.allreduce(x, name="x")
if hvd.rank() == 1:  # in the middle of one
    threading.Timer(0.3, os.kill, (os.getpid(), getattr(signal, sys.argv[1]))).start()
try:
    while True:
        hvd.allreduce(x, name="x")
except Exception as error:
    print(error, flush=True)
os._exit(0)
"""
TALK = """
import horovod.tensorflow as hvd
import tensorflow as tf

def calls():
    lines = open("/proc/self/io").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("syscr", "syscw")))

hvd.init()
x = tf.ones(4)
for _ in range(10):
    hvd.allreduce(x, name="x")
before = calls()
for _ in range(200):
    hvd.allreduce(x, name="x")
print("read and written", calls() - before, flush=True)
"""
NO_ROOM = """
import os, resource, time
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
x = tf.ones(1000)
for _ in range(3):
    hvd.allreduce(x, name="x")
if hvd.rank() == 1:
    used = 4096 * int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + 20_000_000, resource.RLIM_INFINITY))
try:
    print("added", hvd.grouped_allreduce([x, x], op=hvd.Sum, name="pair"), flush=True)
except Exception as error:
    print(f"rank {hvd.rank()} failed: {error}", flush=True)
    time.sleep(4)  # its background thread goes on
os._exit(0)
"""
ACTIVITIES = ("SHARED_MEMORY_ALLREDUCE", "SHARED_MEMORY_ALLGATHER")


def sums(folder, controller, ranks, first="", within=(), **settings):
    """Run the sums, within another command, and return which of their activities were in shared memory."""
    timeline = folder / "timeline.json"  # rank 0 writes one
    command = [*within, *launched(controller, ranks, "-c", SUMS, str(timeline), first)]
    environ = {"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_DYNAMIC_PROCESS_SETS": "1", **settings}
    job = Job(command, cwd=folder, **environ).expect()
    assert job.out.count("as they have to be") == ranks
    return {activity for activity in ACTIVITIES if activity in timeline.read_text()}


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No memory of the test has a name after it."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("horovod-")}


@pytest.mark.parametrize("controller", ["gloo", "mpirun"])
def test_sums_are_those_of_the_ranks_in_order(tmp_path, controller):
    assert sums(tmp_path, controller, 3) == set(ACTIVITIES)


@pytest.mark.extended
@pytest.mark.parametrize(
    "first",
    [
        "os.environ['HOROVOD_SHARED_MEMORY'] = str(int(os.environ['OMPI_COMM_WORLD_RANK'] != '0'))",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))",
    ],
    ids=["refused by one rank", "no room"],
)
def test_ranks_that_share_no_memory_send_messages(tmp_path, first):
    assert not sums(tmp_path, "mpirun", 3, first)


def test_nothing_is_written_to_memory_without_room(tmp_path):
    """The system would end a process that does."""
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    small = "mount -t tmpfs -o size=64k none /dev/shm"
    if subprocess.run([*own, small], capture_output=True).returncode != 0:
        pytest.skip("users of this machine get no mounts of their own")
    full = "assert os.system('cat /dev/zero >/dev/shm/full 2>/dev/null')"
    assert not sums(tmp_path, "gloo", 3, full, within=[*own, f'{small} && exec "$@"', "sh"])


def test_ranks_agree_without_messages(tmp_path):
    """On what all of them have: over Gloo each message is written to a socket, and read."""

    def calls(**settings):
        job = Job(launched("gloo", 2, "-c", TALK), cwd=tmp_path, **settings).expect()
        return [int(each) for each in re.findall(r"read and written (\d+)", job.out)]

    assert max(calls()) < 20, "a heartbeat may come between"
    assert min(calls(HOROVOD_SHARED_MEMORY="0")) > 400


def test_what_a_rank_does_after_a_failure_is_not_taken_for_its_part(tmp_path):
    """It has no room for a buffer, and goes on to what is next, in the same memory."""
    job = Job(launched("gloo", 2, "-c", NO_ROOM), cwd=tmp_path).expect("rank 1 failed")
    assert re.search("rank 0 failed: .*Rank 1 has left in the middle of an exchange", job.out), job.out


@pytest.mark.parametrize(
    ("how", "settings", "said"),
    [
        ("SIGKILL", {}, "Rank 1 has left in the middle of an exchange"),
        ("SIGSTOP", {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3"}, "did not take part in an exchange in time"),
    ],
)
def test_a_rank_that_ends_or_stands_still_fails_the_others(tmp_path, how, settings, said):
    # Without a launcher, which would end the others.
    server, port = start_server()
    with ExitStack() as jobs:
        ranks = []
        for rank in range(3):
            environ = variables(rank, 3, port, HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo", **settings)
            words = [sys.executable, "-c", ONE_ENDS, how]
            ranks.append(jobs.enter_context(Job(words, cwd=tmp_path, **environ)))
        for rank in (0, 2):
            ranks[rank].wait(seconds=100)
            assert said in ranks[rank].text
    server.stop()
