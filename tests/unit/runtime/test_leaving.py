"""How a script was left, and ranks that are done wait for those that still work."""

import contextlib
import io
import subprocess
import sys
import time

import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.leaving import PATIENCE_S, leave_together
from hvdtrain.runtime.session import Session
from tests.launching import job_environment
from tests.unit.threaded_ranks import as_ranks, place
from tests.waiting import wait_until


def test_a_rank_that_still_works_is_waited_for_and_named_by_one_of_those_that_wait():
    def body(channel):
        if channel.rank == 0:
            wait_until(lambda: "still at work" in said.getvalue())
        leave_together(channel, notice=0.5)

    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert as_ranks(3, body) == [None] * 3
    lines = said.getvalue().splitlines()
    assert lines
    assert all("rank 1 is done and has waited" in line and "for rank 0: still at work" in line for line in lines)


def test_ranks_that_come_soon_are_not_spoken_of(capsys):
    assert as_ranks(2, lambda channel: time.sleep(channel.rank) or leave_together(channel)) == [None] * 2
    assert capsys.readouterr().err == ""


def test_patience_has_an_end():
    def body(channel):
        if channel.rank > 0:
            with pytest.raises(LaunchError, match="No message from rank 0 of 3"):
                leave_together(channel, patience=0.5)

    assert as_ranks(3, body) == [None] * 3


@pytest.mark.parametrize("carries", ["horovod", "strategy"])
def test_a_session_waits_longer_than_a_slow_disk_takes(carries):
    waited = []

    class World:
        collectives = {"dp": None} if carries == "horovod" else {}

        def close(self):
            waited.append("closed")

    class Strategy:
        roles = server = None

    class Link:
        control = type("", (), {"barrier": lambda self, timeout, on_wait: waited.append(timeout)})()
        environment = place(1, 2)
        trace = worlds = None

        def stop_threads(self):
            pass

        def close(self):
            waited.append("left")

    Session(link=Link(), world=World(), plan=None, strategy=None if carries == "horovod" else Strategy()).close()  # type: ignore[arg-type]
    assert waited == [PATIENCE_S, *(["closed"] if carries == "horovod" else []), "left"]
    assert PATIENCE_S >= 3600


WATCHED = """
import atexit, sys, threading
from sys import exit as imported
from hvdtrain.runtime.leaving import ExitWatch
watch = ExitWatch()
watch.start()
atexit.register(lambda: print("left", watch.found() or watch.described or None))
def main(code):
    return code
"""


@pytest.mark.parametrize(
    ("end", "code", "left"),
    [
        ("pass", 0, "None"),
        ("sys.exit()", 0, "sys.exit(None) at {script}:9"),
        ("sys.exit(main(0))", 0, "sys.exit(0) at {script}:9"),
        ("sys.exit(main(3))", 3, "The script called sys.exit(3) at {script}:9"),
        ("sys.exit('no data')", 1, "The script called sys.exit(1) at {script}:9"),
        ("exit(3)", 3, "The script called sys.exit(3) at {script}:9"),
        ("quit(3)", 3, "The script called sys.exit(3) at {script}:9"),
        (
            "with open(__file__): sys.exit(3)",
            3,
            "The script called sys.exit(3) at {script}:9",
        ),
        ("import argparse; argparse.ArgumentParser().exit(2)", 2, "The script called sys.exit(2) at {argparse}"),
        ("raise SystemExit(3)", 3, "None"),
        ("imported(3)", 3, "None"),
        ("try: sys.exit(3)\nexcept SystemExit: pass", 0, "None"),
        (
            "try: sys.exit(3)\nfinally: print('cleaned up')",
            3,
            "The script called sys.exit(3) at {script}:9",
        ),
        ("thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()", 0, "None"),
        ("watch.stop(); sys.exit(3)", 3, "None"),
    ],
)
def test_how_a_script_was_left(end, code, left, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WATCHED.strip() + "\n" + end + "\n")
    job = subprocess.run(
        [sys.executable, str(script)], env=job_environment(), capture_output=True, text=True, timeout=60
    )
    assert job.returncode == code, job.stderr
    argparse = sys.modules["argparse"].__file__
    assert f"left {left.format(script=script, argparse=argparse)}" in job.stdout
