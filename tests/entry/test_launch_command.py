"""`python -m hvdtrain launch`: what it prints can be run, and what it runs trains."""

import json
import subprocess
import sys

import pytest

from tests.launching import has_launcher, job_environment, run

pytestmark = pytest.mark.extended

TRAIN = ["digits", "--max-steps", "2", "--run-dir", "run"]
LAUNCH = [sys.executable, "-m", "hvdtrain", "launch"]


def test_it_answers_at_once(tmp_path):
    """Within half a second on an idle machine; no TensorFlow either way."""
    code = (
        "import sys; from hvdtrain.cli.main import main; main(['launch', 'digits']); print('tensorflow' in sys.modules)"
    )
    job = run([sys.executable, "-c", code], cwd=tmp_path, timeout=30)
    assert job.out.splitlines()[-1] == "False", job.text


def test_the_printed_command_trains(tmp_path):
    if not has_launcher("mpirun"):
        pytest.skip("mpirun is not installed")
    line = f"eval \"$('{sys.executable}' -m hvdtrain launch --mpi -np 2 {' '.join(TRAIN)})\""
    job = run(["bash", "-c", line], cwd=tmp_path, timeout=150)
    assert job.code == 0, job.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2, summary


def test_run_becomes_the_launcher_and_returns_its_code(tmp_path):
    if not has_launcher("horovodrun"):
        pytest.skip("horovodrun is not installed")
    job = run([*LAUNCH, "--run", "--gloo", "-np", "2", "digits", "--batch", "3"], cwd=tmp_path, timeout=100)
    assert job.code == 2, job.text
    assert job.text.count("A batch of 3 samples does not divide among 2 ranks") == 1


def test_a_launcher_that_is_not_there_is_named(tmp_path):
    environ = job_environment() | {"PATH": "/nonexistent"}
    code = "import sys; sys.executable='/none/python'; from hvdtrain.cli.main import main; sys.exit(main(['launch']))"
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "horovodrun is not on PATH" in done.stderr
