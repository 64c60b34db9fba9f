"""`python -m hvdtrain launch`: what it prints can be run, and what it runs trains."""

import sys

import pytest

from tests.launching import Job, has_launcher, summary_of

pytestmark = pytest.mark.extended

TRAIN = ["digits", "--max-steps", "2", "--run-dir", "run"]
LAUNCH = [sys.executable, "-m", "hvdtrain", "launch"]


def test_the_printed_command_trains(tmp_path):
    if not has_launcher("mpirun"):
        pytest.skip("mpirun is not installed")
    line = f"eval \"$('{sys.executable}' -m hvdtrain launch --mpi -np 2 {' '.join(TRAIN)})\""
    Job(["bash", "-c", line], cwd=tmp_path).expect()
    summary = summary_of(tmp_path / "run")
    assert summary["world_size"] == 2, summary


def test_run_becomes_the_launcher_and_returns_its_code(tmp_path):
    if not has_launcher("horovodrun"):
        pytest.skip("horovodrun is not installed")
    job = Job([*LAUNCH, "--run", "--gloo", "-np", "2", "digits", "--batch", "3"], cwd=tmp_path).expect(code=2)
    assert job.text.count("A batch of 3 samples does not divide among 2 ranks") == 1
