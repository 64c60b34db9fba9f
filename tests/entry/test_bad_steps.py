"""A data set with an infinite sample, which one rank reads, on the command line."""

import json
import textwrap

import pytest

from tests.launching import hvdtrain, summary_of

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
    assert job.out.count("calls for a rollback: NaN or infinite values in the data of rank ") == 1, job.out
    assert job.out.count("warning: rolled back after step ") == 1, job.out
    assert "bad steps   1 NaN or infinite, 1 rollback\n" in job.out
    bad_steps = summary_of(folder / "run")["bad_steps"]
    (first, last) = bad_steps.pop("rollbacks")[0]
    assert bad_steps == {"non_finite": 1, "spikes": 0}
    assert (first % 5, first <= last <= 20) == (1, True), "from a checkpoint to a logged step"
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["bad_steps"] for record in records if record["kind"] == "epoch"] == [1]
