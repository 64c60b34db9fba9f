"""What `launch/test.sh` says in its last lines, and the seconds that it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report import Outcome, read, summary, table

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest, time

def test_well():
    time.sleep(0.2)

@pytest.mark.parametrize("n", [1, 2])
def test_of_others(n):
    pytest.skip("no sshd here")

def test_of_a_launch(record_property):
    record_property("seconds", 12.5)

@pytest.fixture
def broken():
    yield
    raise OSError("in teardown")

def test_broken(broken):
    pass
"""


@pytest.fixture(scope="module", params=[[], ["-n", "2"]], ids=["here", "xdist"])
def folder(request, tmp_path_factory):
    """Return the folder with the outcome of a run of pytest."""
    place, folder = tmp_path_factory.mktemp("place"), tmp_path_factory.mktemp("folder")
    (place / "test_some.py").write_text(TESTS)
    words = ["-p", "tests.conftest", "-c", os.devnull, "--rootdir", ".", "--report", str(folder / "some tests.json")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", *words, *request.param, "test_some.py"]
    subprocess.run(command, cwd=place, env=environ, check=False, capture_output=True)
    return folder


def test_each_test_has_its_outcome_and_its_seconds(folder):
    outcomes = {name.partition("::")[2]: each for name, each in read(folder / "some tests.json").items()}
    assert outcomes["test_well"].outcome == "passed"
    assert outcomes["test_well"].seconds >= 0.2
    assert outcomes["test_of_a_launch"] == Outcome("passed", 12.5)
    assert outcomes["test_of_others[1]"].outcome == "skipped"
    assert outcomes["test_broken"].outcome == "failed"


def test_the_last_lines_say_what_was_skipped_and_what_failed(folder):
    (folder / "failed").write_text("lint\nsome tests\n")
    (folder / "skipped").write_text("There is no python3.13\n")
    text, well = summary(folder)
    assert text.splitlines() == [
        "Skipped:",
        "  There is no python3.13",
        "  no sshd here",
        "    test_some.py::test_of_others[1] [some tests] and 1 more",
        "Failed:",
        "  test_some.py::test_broken [some tests]",
        "  lint",
        "2 passed, 2 failed, 2 skipped",
    ]
    assert not well


def test_a_green_run_says_so(tmp_path):
    (tmp_path / "unit.json").write_text(json.dumps({"a.py::test_a": {"outcome": "passed", "seconds": 1.0}}))
    assert summary(tmp_path) == ("Nothing was skipped.\n1 passed, 0 failed, 0 skipped", True)


def test_a_check_counts_for_its_own_file_in_the_table():
    launched = "tests/distributed/test_battery.py::test_check"
    outcomes = {
        f"{launched}[mpirun-2-parity.check_adam]": Outcome("passed", 19.0),
        f"{launched}[gloo-2-parity.check_adam]": Outcome("passed", 3.0),
        "tests/unit/test_a.py::test_a": Outcome("passed", 1.0),
        "tests/unit/test_b.py::test_b": Outcome("passed", 2.0),
    }
    assert table(outcomes).splitlines()[2:] == [
        "| tests/distributed/checks/parity.py | 2 | 22 | 19.0: `check_adam (mpirun-2)` |",
        "| others of tests/unit | 2 | 3 | 2.0: `test_b` |",
    ]
