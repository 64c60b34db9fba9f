"""The face with TF_USE_LEGACY_KERAS=1: the tests of its names again, and tests of tf_keras, in their own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEGACY = {"TF_USE_LEGACY_KERAS": "1"}
FILES = ("legacy_keras_cases.py", "test_names.py", "test_elastic.py")


def test_nothing_of_keras_3_is_imported():
    """It would take seconds and memory, and a library that finds it may use it."""
    script = "import sys, hvdtrain.horovod.keras; sys.exit('keras' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], env=os.environ | LEGACY, check=True, timeout=240)


@pytest.mark.extended  # Keras 2 starts TensorFlow once more; Horovod scripts run on Keras 3 every day
def test_the_face_on_tf_keras():
    """TensorFlow decides once in a process what `tf.keras` is."""
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    without = ("-k", "not in_an_elastic_job")  # it starts a process without Keras
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *without, *files]
    root = Path(__file__).parents[3]
    job = subprocess.run(command, cwd=root, env=os.environ | LEGACY, capture_output=True, text=True, timeout=240)
    assert job.returncode == 0, job.stdout[-8000:] + job.stderr[-2000:]
