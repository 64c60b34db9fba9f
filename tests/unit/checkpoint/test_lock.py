"""Two jobs that write to one folder."""

import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.checkpoint.lock import locked
from hvdtrain.config.errors import CheckpointError

HOLDER = """
import sys
from pathlib import Path
from hvdtrain.checkpoint.lock import locked

class Alone:
    primary = True

    def gather_bytes(self, payload, *, timeout, among="job"):
        return [payload]

with locked(Path(sys.argv[1]), Alone(), job="job 1"):
    print("holds", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that writes to `tmp_path/saved`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "saved")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


@pytest.mark.usefixtures("session")
def test_a_second_job_is_refused_until_the_first_is_gone(tmp_path, holder):
    folder = tmp_path / "saved"
    x = np.zeros((8, 2), "float32")
    trainer = hvdtrain.Trainer(keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]), "sgd", "mse")
    who = rf"Received: {re.escape(str(folder))}, to which process {holder.pid} on \S+, since .*, still writes\."
    for _ in range(2):  # being refused does not let go of it for the first
        with pytest.raises(CheckpointError, match=f"One job at a time writes to a folder\\. {who}"):
            trainer.fit(x, x, batch=4, checkpoint=folder, verbose=0)
    assert [path.name for path in folder.iterdir()] == [".lock"]
    holder.kill()  # what it leaves locks nobody out
    holder.wait(30)
    trainer.fit(x, x, batch=4, checkpoint=folder, verbose=0)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]


def test_an_elastic_job_takes_the_lock_from_its_lost_rank(tmp_path, holder):
    """Its host is gone, and the file server does not know yet; or it is stopped, and goes on later."""
    folder = tmp_path / "saved"
    with pytest.raises(CheckpointError, match="One job at a time"), locked(folder, NoOpCollectives(), job="job 2"):
        pass
    with locked(folder, NoOpCollectives(), job="job 1"):
        holder.communicate("\n", timeout=30)  # the lost rank goes on, and leaves
        assert (folder / ".lock").exists()
    assert not (folder / ".lock").exists()


def test_a_folder_that_was_made_for_the_lock_alone_goes_with_it(tmp_path):
    with locked(tmp_path / "a" / "b", NoOpCollectives()):
        assert (tmp_path / "a" / "b" / ".lock").exists()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with locked(tmp_path / "mine", NoOpCollectives()):
        pass
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_folder_that_is_removed_meanwhile_is_no_error_of_the_lock(tmp_path):
    with locked(tmp_path / "run", NoOpCollectives()):
        (tmp_path / "run" / ".lock").unlink()
        (tmp_path / "run").rmdir()


def test_a_file_in_its_place_is_named(tmp_path):
    (tmp_path / "run").write_text("mine")
    with (
        pytest.raises(CheckpointError, match=r"Checkpoints cannot be written to .*/run"),
        locked(tmp_path / "run", NoOpCollectives()),
    ):
        pass
