"""What is known, at the end of a script, of how it was left."""

import subprocess
import sys

import pytest

from tests.launching import job_environment

WATCHED = """
import atexit, sys, threading
from sys import exit as imported
from hvdtrain.runtime.leaving import ExitWatch
watch = ExitWatch()
watch.start()
atexit.register(lambda: print("left", watch.found(), watch.unclear))
def main(code):
    return code
"""


@pytest.mark.parametrize(
    ("end", "code", "left"),
    [
        ("pass", 0, "None False"),
        ("sys.exit()", 0, "None False"),
        ("sys.exit(main(0))", 0, "None False"),
        ("sys.exit(main(3))", 3, "The script called sys.exit(3) at {script}:9. False"),
        ("sys.exit('no data')", 1, "The script called sys.exit(1) at {script}:9. False"),
        ("exit(3)", 3, "The script called sys.exit(3) at {script}:9. False"),
        ("quit(3)", 3, "The script called sys.exit(3) at {script}:9. False"),
        ("with open(__file__): sys.exit(3)", 3, "The script called sys.exit(3) at {script}:9. False"),
        ("import argparse; argparse.ArgumentParser().exit(2)", 2, "The script called sys.exit(2) at {argparse}"),
        ("raise SystemExit(3)", 3, "None True"),
        ("imported(3)", 3, "None True"),
        ("try: sys.exit(3)\nexcept SystemExit: pass", 0, "None False"),
        ("try: sys.exit(3)\nfinally: print('cleaned up')", 3, "The script called sys.exit(3) at {script}:9. False"),
        ("thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()", 0, "None False"),
        ("watch.stop(); sys.exit(3)", 3, "None True"),
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
