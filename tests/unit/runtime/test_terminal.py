"""Which runs get the live display."""

import os
import sys
from contextlib import contextmanager
from dataclasses import replace

from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.terminal import drop_unreadable_output, on_terminal

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
    assert seen == {"/dev/pts/3": True, "pipe:[4711]": False}


def test_tagged_output_is_never_redrawn(monkeypatch):
    launcher_writes_to(monkeypatch, "/dev/pts/3")
    with terminal_output(monkeypatch):
        assert not on_terminal(RANK, {**XTERM, "OMPI_MCA_orte_tag_output": "1"})


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
