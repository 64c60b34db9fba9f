"""How a rank ends that `horovodrun` no longer wants, through Horovod's own functions that start it."""

import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest

safe_shell_exec = pytest.importorskip("horovod.runner.common.util.safe_shell_exec", reason="Horovod is not installed")

RANK = """
import signal, subprocess, sys, time
deaf = "deaf" in sys.argv
def leave(number, frame):
    time.sleep(6 if "slow" in sys.argv else 0.2)
    print("saved", flush=True)
    raise SystemExit(75)
signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else leave)
waits = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-S", "-c", waits]) for _ in range(8 if deaf else 0)]
print("children", *[child.pid for child in children], flush=True)
print("began", flush=True)
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
    output, ended, codes = Output(), threading.Event(), []
    before = set(threading.enumerate())

    def run():
        codes.append(safe_shell_exec.execute(command, stdout=output, stderr=output, events=[ended]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while "began" not in output.text and time.monotonic() < deadline:
        time.sleep(0.02)
    ended.set()
    thread.join(60)
    for left in set(threading.enumerate()) - before:  # one that waits for `ended`, and for other tests to find
        left.join(10)
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


@pytest.mark.extended
def test_a_rank_has_the_time_that_the_user_gives_it(monkeypatch):
    assert run_and_end(rank("slow"))[0] == 137, "Horovod's own 5 seconds"
    monkeypatch.setenv("HOROVOD_GRACEFUL_TERMINATION_TIME", "60")
    code, text = run_and_end(rank("slow"))
    assert "saved" in text
    assert code == 75


@pytest.mark.extended
@pytest.mark.parametrize("command", ["{rank}; exit $?", "exec {rank}"])
def test_a_rank_that_does_not_end_is_killed_with_what_it_has_started(command):
    psutil = pytest.importorskip("psutil")
    code, text = run_and_end(command.format(rank=rank("deaf")))
    assert code == 137, text
    children = [int(word) for word in text.split()[1:9]]
    deadline = time.monotonic() + 10
    while (alive := [pid for pid in children if is_alive(psutil, pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def is_alive(psutil, pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("command", ["{script}", "exec {script}"])
def test_a_script_around_a_rank_ends_and_the_rank_is_asked_then(tmp_path, command):
    (tmp_path / "train.sh").write_text(f"{rank()}\necho not reached\n")
    code, text = run_and_end(command.format(script=f"sh {shlex.quote(str(tmp_path / 'train.sh'))}"))
    assert "saved" in text
    assert "not reached" not in text
    assert code == 143, "that of the script"


def test_a_rank_that_was_not_started_yet_is_asked_as_soon_as_it_is():
    shell = subprocess.Popen(f"read line; {rank()}; exit $?", shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    ending = threading.Thread(target=safe_shell_exec.ShellTermination(shell.pid).run, args=(60.0,))
    ending.start()
    time.sleep(0.3)
    shell.stdin.write(b"go\n")
    shell.stdin.close()
    ending.join(30)
    assert not ending.is_alive()
    assert shell.wait(30) in (75, 128 + signal.SIGTERM)
    shell.stdout.close()
