"""A signal to a launcher's process alone, as from a supervisor, and to its group, as from a terminal."""

import os
import signal
import time

import psutil
import pytest

from tests.awake import awake_seconds
from tests.launching import Job, launched

PATIENCE_S = 60.0
RANK = """
import os, pathlib, signal, sys, time

def leave(number, frame):
    time.sleep(0.2)
    pathlib.Path(f"saved-{os.getpid()}").touch()
    sys.exit(75)

signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
pathlib.Path(f"began-{os.getpid()}").touch()
while True:
    time.sleep(0.05)
"""
CODES = {"mpi": 1, "gloo": 75, "mpirun": 1}
"""Of the launcher; mpirun ends with 1 whatever the ranks' code is."""
SOON_S = 30.0


def wait_for(condition, what):
    limit = awake_seconds() + PATIENCE_S
    while not condition():
        assert awake_seconds() < limit, f"{what} within {PATIENCE_S} s"
        time.sleep(0.05)


def is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Every day: a shell between horovodrun and mpirun would neither pass SIGTERM on nor end at SIGINT.
@pytest.mark.parametrize("to", ["the launcher", pytest.param("its group", marks=pytest.mark.extended)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize(
    "controller", ["mpi", *(pytest.param(name, marks=pytest.mark.extended) for name in ("gloo", "mpirun"))]
)
def test_a_signal_ends_the_job_soon_with_a_code_and_leaves_no_process(tmp_path, controller, number, to):
    command = launched(controller, 2, "-S", "-c", RANK)
    with Job(command, cwd=tmp_path) as job:
        started = [psutil.Process(job.process.pid)]
        try:
            wait_for(lambda: len(list(tmp_path.glob("began-*"))) == 2, "no ranks")
            started += started[0].children(recursive=True)
            (os.kill if to == "the launcher" else os.killpg)(job.process.pid, number)
            begin = awake_seconds()
            wait_for(lambda: job.code is not None, "the launcher does not end")
            assert awake_seconds() - begin < SOON_S
            # mpirun does not wait for ranks that it has told to end.
            wait_for(lambda: not any(map(is_alive, started)), "processes are left")
        finally:
            for left in filter(is_alive, started):
                left.kill()
    assert job.code == CODES[controller], job.text
    if controller == "gloo":  # mpirun kills ranks about 2 s later, which a loaded machine may need to wake them
        assert len(list(tmp_path.glob("saved-*"))) == 2, job.text
