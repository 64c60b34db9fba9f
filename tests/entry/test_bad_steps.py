"""A data set with an infinite sample, which one rank reads, on the command line."""

import json
import sys
import textwrap

import pytest

from tests.launching import hvdtrain, launcher, run

pytestmark = pytest.mark.extended

DATA = """\
    import numpy as np

    def build():
        x = np.random.default_rng(0).random((16 * 20, 4)).astype("float32")
        y = x.argmax(axis=1)
        x[77] = np.inf
        return (x, y), (x[:64], y[:64])
"""
WORDS = ("train", "--data", "spoiled:build", "--model", "mlp", "--batch", "16", "--epochs", "1", "--spike-threshold")
WORDS += ("1000", "--checkpoint-every", "5", "--plots", "False", "--tensorboard", "False")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "spoiled.py").write_text(textwrap.dedent(DATA))
    return tmp_path


def test_a_run_is_rolled_back_and_says_so(folder):
    """By the name of the rank, and in the figures of the epoch and the run."""
    job = hvdtrain(
        "gloo", 2, *WORDS, "--on-bad-step", "rollback", "--desync-every", "3", "--run-dir", "run", cwd=folder
    )
    assert job.code == 0, job.text[-4000:]
    assert job.out.count("calls for a rollback: NaN or infinite values in the data of rank ") == 1, job.out
    assert job.out.count("warning: rolled back after step ") == 1, job.out
    assert "bad steps   1 NaN or infinite, 1 rollback\n" in job.out
    bad_steps = json.loads((folder / "run" / "summary.json").read_text())["bad_steps"]
    (first, last) = bad_steps.pop("rollbacks")[0]
    assert bad_steps == {"non_finite": 1, "spikes": 0}
    assert (first % 5, first <= last <= 20) == (1, True), "from a checkpoint to a logged step"
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["bad_steps"] for record in records if record["kind"] == "epoch"] == [1]


def test_skipping_without_end_is_an_error(folder):
    words = [*WORDS, "--on-bad-step", "skip", "--max-bad-steps", "2", "--run-dir", "run"]
    text = (folder / "spoiled.py").read_text().replace("x[77]", "x[77:]")
    (folder / "spoiled.py").write_text(text)
    job = hvdtrain("none", 1, *words, cwd=folder)
    assert job.code == 2, job.text[-4000:]
    assert "steps in a row were bad (step " in job.err
    assert "--max-bad-steps 2 is the most that is tolerated" in job.err


def test_an_elastic_job_and_one_under_mpi_count_the_same_steps(folder):
    (folder / "discover.sh").write_text("#!/bin/sh\necho localhost:2\n")
    (folder / "discover.sh").chmod(0o755)
    hosts = ["--network-interfaces", "lo", "--host-discovery-script", "./discover.sh"]
    elastic = [*launcher("gloo", 2), "--min-np", "1", "--max-np", "2", *hosts]
    words = [*WORDS, "--model-args", "depth", "1", "width", "8", "--epochs", "2", "--on-bad-step", "skip"]
    counts = {}
    for name, start, more in (("elastic", elastic, ["--elastic"]), ("mpi", launcher("mpirun", 2), [])):
        command = [*start, sys.executable, "-m", "hvdtrain", *words, *more, "--run-dir", name]
        job = run(command, cwd=folder, timeout=150)
        assert job.code == 0, job.text[-4000:]
        counts[name] = json.loads((folder / name / "summary.json").read_text())["bad_steps"]
    assert counts["elastic"] == counts["mpi"] == {"non_finite": 2, "spikes": 0, "rollbacks": []}
