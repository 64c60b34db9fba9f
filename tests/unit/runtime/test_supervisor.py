"""A job that is started again after it has failed."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hvdtrain.cli.supervise import main
from hvdtrain.runtime.supervisor import Supervisor

COUNTS = """
import pathlib, sys
starts = pathlib.Path("starts")
count = int(starts.read_text()) + 1 if starts.exists() else 1
starts.write_text(str(count))
codes = [int(code) for code in sys.argv[1:]]
sys.exit(codes[min(count, len(codes)) - 1])
"""


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """Return a function that supervises a job whose starts end with these codes, and returns code and starts."""
    monkeypatch.chdir(tmp_path)

    def run(*codes, restarts=3):
        command = [sys.executable, "-c", COUNTS, *map(str, codes)]
        code = Supervisor(command, restarts, pause=0.01).run()
        return code, int((tmp_path / "starts").read_text())

    return run


@pytest.mark.parametrize(
    ("codes", "outcome"),
    [
        ((0,), (0, 1)),
        ((137, 1, 0), (0, 3)),
        ((3,), (3, 4)),
        ((124, 2), (2, 2)),
        ((75,), (75, 1)),
        ((130,), (130, 1)),
        ((143,), (143, 1)),
    ],
)
def test_a_failed_job_is_started_again(supervised, codes, outcome):
    assert supervised(*codes) == outcome


def test_each_restart_is_told(supervised, capfd):
    supervised(7, restarts=1)
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("hvdtrain: the job ended with code 7 after 0 s. Restart 1 of 1.")
    assert said[1] == "hvdtrain: the job ended with code 7 after 0 s, after 1 restarts: it is not started again."


def test_a_job_that_a_signal_ends_fails_with_the_shells_code():
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert Supervisor(command, 0).run() == 137


def test_a_signal_reaches_the_job_once_and_is_its_end(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import os, signal, sys, time\n"  # print() within print() is refused
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'usr1\\n'))\n"
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'term\\n'), sys.exit(9)))\n"
        "os.write(1, b'ready\\n')\n"
        "while True: time.sleep(0.05)\n"
    )
    command = [sys.executable, "-m", "hvdtrain", "supervise", "--", sys.executable, str(script)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGUSR1)
    assert job.stdout.readline() == "usr1\n"
    job.send_signal(signal.SIGTERM)
    assert job.communicate(timeout=20)[0] == "term\n"
    assert job.returncode == 9


def test_a_signal_during_the_pause_ends_the_wait(tmp_path):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    begin = time.monotonic()
    assert Supervisor([sys.executable, "-c", "raise SystemExit(5)"], 3, pause=50.0).run() == 5
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "supervise needs the command that starts the ranks"),
        (["--", "/nothing/there"], "The command cannot be started: /nothing/there (No such file or directory)."),
        (["--max-restarts", "0", "--", "true"], "must be a whole number of at least 1"),
    ],
)
def test_mistakes_are_told(words, said, capfd):
    assert main(words) == 2
    assert said in capfd.readouterr().err


def test_the_launcher_is_started_by_it_and_not_the_other_way_round(monkeypatch, capfd):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert main(["--", "true"]) == 2
    assert "supervise starts the launcher. Received: a start by" in capfd.readouterr().err
