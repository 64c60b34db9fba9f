"""Where messages go, and which runs get the live display."""

import fcntl
import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from hvdtrain.runtime.control.channel import let_readers_finish
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.logs import LOGGER, PROGRESS, RankLog, drop_unreadable_output, on_terminal, say, set_up_logging

ALONE = detect_environment({})
RANK = replace(ALONE, launcher="mpirun", controller="mpi", size=2)
XTERM = {"TERM": "xterm"}


@contextmanager
def terminal_output(monkeypatch):
    """Standard output on a terminal of its own, as Open MPI gives each rank one."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        yield
    os.close(ours)


def launcher_writes_to(monkeypatch, target):
    monkeypatch.setattr(os, "readlink", lambda path: target)


def test_a_pipe_or_a_dumb_terminal_is_none(monkeypatch):
    with terminal_output(monkeypatch):
        seen = [on_terminal(ALONE, environ) for environ in (XTERM, {"TERM": "dumb"}, {})]
    assert seen == [True, False, False]
    with open(os.devnull, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert not on_terminal(ALONE, XTERM)


def test_the_launcher_decides_for_its_ranks(monkeypatch):
    seen = {}
    for target in ("/dev/pts/3", "pipe:[4711]"):
        launcher_writes_to(monkeypatch, target)
        with terminal_output(monkeypatch):
            seen[target] = on_terminal(RANK, XTERM)
            assert not on_terminal(RANK, {**XTERM, "OMPI_MCA_orte_tag_output": "1"}), "tagged lines are never redrawn"
    assert seen == {"/dev/pts/3": True, "pipe:[4711]": False}


def test_what_nobody_reads_is_dropped(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        pipe.write("unread")
        drop_unreadable_output()
        print("more", flush=True)
    monkeypatch.setattr(sys, "stdout", None)
    drop_unreadable_output()
    assert not on_terminal(ALONE, XTERM)


@pytest.fixture
def rank_1():
    set_up_logging(1)
    yield
    set_up_logging()


def test_messages_go_to_standard_error_and_progress_to_standard_output(capsys):
    LOGGER.info("one")
    LOGGER.warning("two")
    LOGGER.error("three")
    PROGRESS.info("step 1/2")
    say("rank 0 failed:\nTraceback")
    shown = capsys.readouterr()
    assert shown.out == "step 1/2\n"
    assert shown.err == "hvdtrain: one\nhvdtrain: warning: two\nhvdtrain: error: three\nrank 0 failed:\nTraceback\n"


def test_other_ranks_show_warnings_and_failures_alone(rank_1, capsys):
    LOGGER.info("one")
    LOGGER.warning("two")
    say("three")
    assert capsys.readouterr().err == "hvdtrain: warning: two\nthree\n"


def test_a_ranks_file_has_all_of_its_messages(rank_1, tmp_path):
    log = RankLog()
    log.start(tmp_path / "logs" / "rank-1.log", "rank 1 of 2")
    LOGGER.info("one")
    PROGRESS.info("epoch 1/1")
    log.start(tmp_path / "logs" / "rank-1.log", "world 2")
    LOGGER.warning("%d%%", 2)
    log.close()
    LOGGER.warning("after")
    lines = (tmp_path / "logs" / "rank-1.log").read_text().splitlines()
    assert [line[25:] for line in lines if line.startswith("----")] == ["rank 1 of 2", "world 2"]
    assert [line.split(" ", 2)[2] for line in lines if not line.startswith("----")] == [
        "INFO one",
        "INFO epoch 1/1",
        "WARNING 2%",
    ]


def test_the_traceback_of_a_rank_that_ends_at_once_is_in_its_file(tmp_path):
    code = f"""
        from pathlib import Path
        from hvdtrain.runtime.control.channel import end_process
        from hvdtrain.runtime.logs import RankLog, say, set_up_logging
        import time

        set_up_logging(1)
        RankLog().start(Path({str(tmp_path / "rank-1.log")!r}), "rank 1 of 2")
        say("rank 1 failed:\\nValueError: mine")
        time.sleep(0.2)  # as a rank that fails
        end_process(1)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, "rank 1 failed:\nValueError: mine\n")
    assert "ERROR rank 1 failed:\nValueError: mine\n" in (tmp_path / "rank-1.log").read_text()


def test_an_end_waits_for_its_readers_and_not_for_ever(monkeypatch):
    read, write = os.pipe()
    monkeypatch.setattr(os, "fstat", lambda number, fstat=os.fstat: fstat(write))
    monkeypatch.setattr(fcntl, "ioctl", lambda number, *rest, ioctl=fcntl.ioctl: ioctl(write, *rest))
    os.write(write, b"text")
    begin = time.monotonic()
    let_readers_finish(0.3)
    assert 0.25 < time.monotonic() - begin < 2
    threading.Timer(0.1, lambda: os.read(read, 100)).start()
    begin = time.monotonic()
    let_readers_finish(20)
    assert time.monotonic() - begin < 10
