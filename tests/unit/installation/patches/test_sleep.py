"""What Horovod's background thread does while there is nothing to exchange, and once there is."""

import json
from itertools import pairwise

import pytest

from tests.launching import Job, launched

pytest.importorskip("horovod", reason="Horovod is not installed")

IDLE_S = 2.0
START = """
import sys, time
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
hvd.start_timeline(sys.argv[1], mark_cycles=True)
"""
IDLE = f"""{START}
for number in range(3):
    print("sum", int(hvd.allreduce(tf.constant(1), op=hvd.Sum, name=str(number))), flush=True)
    time.sleep({IDLE_S} / 2)
hvd.stop_timeline()
hvd.shutdown()
"""
IN_A_ROW = f"""{START}
for _ in range(int(sys.argv[2])):
    hvd.allreduce(tf.constant(1), name="one")
hvd.stop_timeline()
hvd.shutdown()
"""
# Each rank has a tensor that the other one lacks, until both have both.
APART = f"""{START}
from concurrent.futures import ThreadPoolExecutor

# Functions, since names are of operations in graphs.
sums = {{
    name: tf.function(lambda name=name: hvd.allreduce(tf.constant(1), op=hvd.Sum, name=name)) for name in "ab"
}}
first, second = "ab" if hvd.rank() == 0 else "ba"
with ThreadPoolExecutor() as threads:
    for _ in range(2):  # the second time these tensors are known
        one = threads.submit(sums[first])
        time.sleep({IDLE_S})
        print("sums", int(sums[second]()), int(one.result()), flush=True)
hvd.stop_timeline()
hvd.shutdown()
"""
ALONE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}


def ran(script, folder, *words, ranks=1, **settings):
    """Run a script, and return what it printed and the times, in seconds, at which rank 0's cycles began."""
    timeline = folder / "timeline.json"
    environ = ({} if ranks > 1 else ALONE) | {"HOROVOD_TIMELINE": "DYNAMIC"} | settings
    command = launched("gloo" if ranks > 1 else "none", ranks, "-c", script, str(timeline), *words)
    job = Job(command, cwd=folder, **environ).expect()
    text = timeline.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else f"{text}]")
    return job.out, [event["ts"] / 1e6 for event in events if event.get("name") == "CYCLE_START"]


def test_a_process_without_tensors_takes_few_cycles(tmp_path):
    """One for each tensor and one every quarter of a second; there were 2,000 in a second."""
    said, cycles = ran(IDLE, tmp_path)
    assert said == "sum 1\n" * 3
    assert 3 <= len(cycles) <= 60


def test_a_tensor_is_exchanged_at_once_unless_a_cycle_time_is_set(tmp_path):
    _, cycles = ran(IN_A_ROW, tmp_path, "5", HOROVOD_CYCLE_TIME="100")
    assert min(later - one for one, later in pairwise(cycles)) > 0.09
    _, cycles = ran(IN_A_ROW, tmp_path, "200")
    assert len(cycles) >= 100
    assert min(later - one for one, later in pairwise(cycles)) < 0.00045


def test_cycles_that_find_nothing_to_exchange_are_apart(tmp_path):
    """Up to half a millisecond: without that there are tens of thousands in these seconds."""
    said, cycles = ran(APART, tmp_path, ranks=2)
    assert said.count("sums 2 2") == 4
    assert len(cycles) >= 100
    assert len(cycles) / (cycles[-1] - cycles[0]) <= 2500
