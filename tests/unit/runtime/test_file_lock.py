"""Locks on files, between processes and between threads of one."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.checkpoint.drafts import Draft, clear_leavings
from hvdtrain.checkpoint.lock import FolderLock, locked
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.file_lock import lock, open_locked

TRY = """
import sys
from pathlib import Path
from hvdtrain.runtime.file_lock import open_locked
try:
    open_locked(Path(sys.argv[1]))
except BlockingIOError:
    print("held")
else:
    print("free")
"""


def seen_by_another_process(file):
    """Return whether another process finds the file's lock "held" or "free"."""
    return subprocess.run(
        [sys.executable, "-c", TRY, str(file)], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_a_lock_holds_off_processes_and_threads_until_its_file_is_closed(tmp_path):
    file = tmp_path / "lock"
    held = open_locked(file)
    assert seen_by_another_process(file) == "held"
    with pytest.raises(BlockingIOError):
        open_locked(file)
    with open(file):
        pass
    assert seen_by_another_process(file) == "held", "closing another descriptor keeps it"
    os.close(held)
    assert seen_by_another_process(file) == "free"


def test_who_waits_gets_the_lock_of_a_file_that_has_its_name(tmp_path):
    """The holder removes the file: who waits for it locks a new one."""
    file, got = tmp_path / "lock", []
    held = open_locked(file)
    waiting = threading.Thread(target=lambda: got.append(open_locked(file, wait=True)))
    waiting.start()
    file.unlink()
    os.close(held)
    waiting.join(20)
    assert got
    assert seen_by_another_process(file) == "held"
    os.close(got[0])


def test_a_folder_belongs_to_one_job(tmp_path):
    with locked(tmp_path / "run", NoOpCollectives()):
        assert seen_by_another_process(tmp_path / "run" / ".lock") == "held"
        with pytest.raises(CheckpointError, match="One job at a time"):
            FolderLock(tmp_path / "run").acquire()


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
            assert seen_by_another_process(tmp_path / "run" / ".lock") == "held", (
                "the child's release is not its parent's"
            )
            process.kill()
            process.wait(20)
            assert seen_by_another_process(tmp_path / "run" / ".lock") == "free"
        finally:
            os.kill(max(children), signal.SIGKILL)


def test_a_draft_is_cleared_away_once_its_writer_is_gone(tmp_path):
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom hvdtrain.checkpoint.drafts import Draft\n"
        "draft = Draft(Path(sys.argv[1]), 'step-00000001')\n(draft.path / 'half').write_text('half')\n"
        "print(draft.path, flush=True)\nsys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        draft, own = Path(process.stdout.readline().strip()), Draft(tmp_path, "step-00000002")
        clear_leavings(tmp_path)
        assert (draft / "half").exists()
        assert own.path.exists()
        process.kill()
        process.wait(20)
        clear_leavings(tmp_path)
        assert not draft.exists()
    own.give_up()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_opens_files_without_one(tmp_path, monkeypatch):
    def none(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("hvdtrain.runtime.file_lock.fcntl.fcntl", none)
    os.close(open_locked(tmp_path / "lock"))
    with locked(tmp_path / "run", NoOpCollectives()):
        assert (tmp_path / "run" / ".lock").exists()
    draft = Draft(tmp_path, "step-00000001")
    clear_leavings(tmp_path)
    assert draft.path.exists(), "somebody may be writing it"
    draft.give_up()
    with open(tmp_path / "lock", "w") as file, pytest.raises(OSError, match="No locks available"):
        lock(file.fileno())


def test_no_other_file_locks_in_another_way():
    other = re.compile(r"\bfcntl\.(flock|lockf|F_(OFD_)?(SETLKW?|GETLK))\b")
    sources = Path(hvdtrain.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if other.search(path.read_text())] == ["file_lock.py"]
