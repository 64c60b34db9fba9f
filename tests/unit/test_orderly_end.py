"""How a rank ends that `horovodrun` no longer wants, through Horovod's own functions that start it."""

import shlex
import sys
import threading
import time

import pytest

from hvdtrain.runtime.horovodrun.orderly_end import middleman
from hvdtrain.runtime.horovodrun.replaced import replaced

RANK = """
import signal, subprocess, sys, time
def leave(number, frame):
    time.sleep(0.2)
    print("saved", flush=True)
    raise SystemExit(75)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else leave)
if "deaf" in sys.argv:
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.pause()"])
print("began", child.pid if "deaf" in sys.argv else "", flush=True)
while True:
    time.sleep(0.05)
"""


class Output:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def run_and_end(command):
    """Run `command` as `horovodrun` runs a rank, end it once it has begun; return its code and output."""
    safe_shell_exec = pytest.importorskip("horovod.runner.common.util.safe_shell_exec")
    output, ended, codes = Output(), threading.Event(), []

    def run():
        codes.append(safe_shell_exec.execute(command, stdout=output, stderr=output, events=[ended]))

    with replaced(safe_shell_exec, _exec_middleman=middleman):
        thread = threading.Thread(target=run)
        thread.start()
        deadline = time.monotonic() + 60
        while "began" not in output.text and time.monotonic() < deadline:
            time.sleep(0.02)
        ended.set()
        thread.join(60)
    assert codes, output.text
    return codes[0], output.text


def rank(*words):
    return shlex.join([sys.executable, "-c", RANK, *words])


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("env A=1 {rank}", id="as Horovod does"),
        pytest.param("exec env A=1 {rank}", id="by a shell that its command replaces"),
        pytest.param("{rank}; code=$?; sleep 0.5; exit $code", id="by a shell that is slow"),
    ],
)
def test_a_rank_is_asked_first_and_its_code_is_passed_on(command):
    code, text = run_and_end(command.format(rank=rank()))
    assert "saved" in text
    assert code == 75, text


@pytest.mark.parametrize("command", ["{rank}; exit $?", "exec {rank}"])
def test_a_rank_that_does_not_end_is_killed_with_what_it_has_started(command):
    psutil = pytest.importorskip("psutil")
    code, text = run_and_end(command.format(rank=rank("deaf")))
    assert code == 137, text
    child = int(text.split()[1])
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_a_rank_that_ends_by_itself_keeps_its_code():
    code, text = run_and_end("echo began; exit 3")
    assert (code, text) == (3, "began\n")
