"""Two jobs that write to one folder."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.checkpoint.lock import FolderLock, locked
from hvdtrain.checkpoint.pending import PendingCheckpoint, clear_leavings
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

WRITER = """
import sys
from pathlib import Path
from hvdtrain.checkpoint.pending import PendingCheckpoint

draft = PendingCheckpoint(final=Path(sys.argv[1]) / "step-00000001", rank=0)
draft.create()
(draft.path / "half").write_text("half")
print(draft.path, flush=True)
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
        with pytest.raises(CheckpointError, match=f"One job at a time writes to a folder\\. {who}") as raised:
            trainer.fit(x, x, batch=4, checkpoint=folder, verbose=0)
        assert raised.value.__suppress_context__
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


def test_a_file_in_its_place_is_named(tmp_path):
    (tmp_path / "run").write_text("mine")
    with (
        pytest.raises(CheckpointError, match=r"Checkpoints cannot be written to .*/run: it is a file"),
        locked(tmp_path / "run", NoOpCollectives()),
    ):
        pass


def is_held(folder):
    """Return whether another job is refused."""
    lock = FolderLock(folder)
    try:
        lock.acquire()
    except CheckpointError:
        return True
    lock.release()
    return False


def test_a_folder_belongs_to_one_job_whatever_reads_its_lock(tmp_path):
    with locked(tmp_path / "run", NoOpCollectives()):
        (tmp_path / "run" / ".lock").read_text()
        assert is_held(tmp_path / "run")
        assert is_held(tmp_path / "run"), "being refused does not let go of it for the first"
    assert not is_held(tmp_path / "run")


def test_a_lock_is_renewed_where_its_folder_was_made_again(tmp_path):
    lock = FolderLock(tmp_path / "run")
    lock.renew()
    assert not (tmp_path / "run").exists(), "it was never taken"
    lock.acquire()
    shutil.rmtree(tmp_path / "run")
    lock.renew()
    assert is_held(tmp_path / "run")
    lock.release()
    assert not is_held(tmp_path / "run")


def test_a_forked_child_does_not_keep_a_folder_locked(tmp_path):
    """Data workers may outlive a process that was killed."""
    script = (
        "import os, sys, time, warnings\nfrom pathlib import Path\nfrom hvdtrain.checkpoint.lock import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1]))\nlock.acquire()\nchild = os.fork()\n"
        # Both in one write: an unbuffered print takes two, and the other process's come between them.
        "if not child:\n    lock.release()\nos.write(1, b'%d\\n' % child)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        children = [int(process.stdout.readline()), int(process.stdout.readline())]
        try:
            assert is_held(tmp_path / "run"), "the child's release is not its parent's"
            process.kill()
            process.wait(20)
            assert not is_held(tmp_path / "run")
        finally:
            os.kill(max(children), signal.SIGKILL)


def test_a_file_system_without_locks_locks_nobody_out(tmp_path, monkeypatch):
    def none(*arguments):
        raise OSError(37, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", none)
        with locked(tmp_path / "run", NoOpCollectives()) as lock:
            assert not is_held(tmp_path / "run")
            lock.renew()
        draft = PendingCheckpoint(final=tmp_path / "step-00000001", rank=0)
        draft.create()
        clear_leavings(tmp_path)
        assert draft.path.exists(), "somebody may be writing it"
        draft.give_up()
    assert not list(tmp_path.glob(".step*"))


@pytest.mark.extended
def test_what_a_killed_writer_leaves_is_cleared_away(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        draft = Path(process.stdout.readline().strip())
        own = PendingCheckpoint(final=tmp_path / "step-00000002", rank=0)
        own.create()
        clear_leavings(tmp_path)
        assert (draft / "half").exists()
        assert own.path.exists()
        process.kill()
        process.wait(20)
        clear_leavings(tmp_path)
        assert not draft.exists()
    own.give_up()
    assert list(tmp_path.iterdir()) == []
