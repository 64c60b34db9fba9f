"""Starting Horovod a second time in one process."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed")

SCRIPT = """
import horovod.tensorflow as hvd
import tensorflow as tf
for _ in range(3):
    hvd.init()
    print("sum", int(hvd.allreduce(tf.constant(1), op=hvd.Sum)), flush=True)
    hvd.shutdown()
"""
CYCLE = {"HOROVOD_CYCLE_TIME": "1"}
THRESHOLD = {"HOROVOD_FUSION_THRESHOLD": "1048576"}


@pytest.mark.extended
@pytest.mark.parametrize(
    "fixed",
    [
        pytest.param(CYCLE | THRESHOLD, id="both"),
        pytest.param(CYCLE, id="cycle"),
        pytest.param(THRESHOLD, id="threshold"),
    ],
)
def test_a_process_may_start_horovod_again_with_a_fixed_cycle_time_and_threshold(fixed):
    alone = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", SCRIPT]
    job = subprocess.run(command, env=os.environ | alone | fixed, capture_output=True, text=True, timeout=120)
    assert (job.returncode, job.stdout) == (0, "sum 1\n" * 3), job.stderr
