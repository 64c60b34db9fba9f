"""The face with TF_USE_LEGACY_KERAS=1: the tests of its names again, and tests of tf_keras, in their own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("legacy_keras_cases.py", "test_names.py", "test_elastic.py")


@pytest.mark.extended  # Keras 2 starts TensorFlow once more; Horovod scripts run on Keras 3 every day
def test_the_face_on_tf_keras():
    """TensorFlow decides once in a process what `tf.keras` is."""
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    without = ("-k", "not in_an_elastic_job")  # it starts a process without Keras
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *without, *files]
    root = Path(__file__).parents[3]
    job = subprocess.run(
        command, cwd=root, env=os.environ | {"TF_USE_LEGACY_KERAS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert job.returncode == 0, job.stdout[-8000:] + job.stderr[-2000:]
