"""What Horovod's background thread does while there is nothing to exchange."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed")

IDLE_S = 2.0
SCRIPT = f"""
import sys, time
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
hvd.start_timeline(sys.argv[1], mark_cycles=True)
for number in range(3):
    print("sum", int(hvd.allreduce(tf.constant(1), op=hvd.Sum, name=str(number))), flush=True)
    time.sleep({IDLE_S} / 2)
hvd.stop_timeline()
hvd.shutdown()
"""


def cycles(timeline):
    """Times, in seconds, at which the background thread began a cycle."""
    text = timeline.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else f"{text}]")
    return [event["ts"] / 1e6 for event in events if event.get("name") == "CYCLE_START"]


def test_a_process_without_tensors_takes_few_cycles(tmp_path):
    """One for each tensor and one every quarter of a second; there were 2,000 in a second."""
    alone = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_CYCLE_TIME": "0.5"}
    timeline = tmp_path / "timeline.json"
    command = [sys.executable, "-c", SCRIPT, str(timeline)]
    environ = os.environ | alone | {"HOROVOD_TIMELINE": "DYNAMIC"}
    job = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert (job.returncode, job.stdout) == (0, "sum 1\n" * 3), job.stderr
    assert 3 <= len(cycles(timeline)) <= 60
