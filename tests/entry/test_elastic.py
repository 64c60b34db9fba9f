"""Elastic jobs: ranks are lost, others come, and training ends as if it had been stopped and resumed."""

import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.launching import Job, hvdtrain, launched, summary_of

HERE = Path(__file__).parent / "elastic_jobs"
TRAIN = ["digits", "--model", "mlp", "--data", "slow_samples:load", "--batch", "24", "--epochs", "16"]
STEPS = 160
LIMIT_S = 400
NAMES = ("localhost", "127.0.0.1", "127.1", "127.0.1", "0x7f000001", "2130706433")
"""Of this machine. A host whose rank was lost is not used again."""


def elastic(folder, ranks, *words, more=1):
    """The command of an elastic job of so many ranks; `more` hosts come when there is a file `more`."""
    now, later = NAMES[:ranks], NAMES[ranks : ranks + more]
    lines = "; ".join(f"echo {name}:1" for name in now)
    lines_later = "; ".join(f"echo {name}:1" for name in later)
    discover = folder / "discover.sh"
    discover.write_text(f"#!/bin/sh\n{lines}; if test -e more; then {lines_later or 'true'}; fi\n")
    discover.chmod(0o755)
    size = ["--min-np", "1", "--max-np", str(ranks), "--network-interfaces", "lo"]
    return launched("gloo", ranks, *words, options=[*size, "--host-discovery-script", str(discover)])


class ElasticJob(Job):
    """An elastic job under way in a folder."""

    def wait_for_step(self, step):
        self.wait(lambda: last_step(self.folder) >= step, seconds=LIMIT_S)

    def wait_for_world(self, before, now):
        """Wait for the message of a world, and return the step with which it began."""
        message = re.compile(rf"elastic: {before} ranks? before, {now} now: goes on after step (\d+)$", re.MULTILINE)
        self.wait(lambda: message.search(self.text), seconds=LIMIT_S)
        found = message.search(self.text)
        assert found, self.text[-6000:]
        return int(found[1])

    def send(self, rank, number):
        os.kill(int((self.folder / f"rank-{rank}.pid").read_text()), number)


def last_step(folder):
    try:
        return json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    except (OSError, ValueError, IndexError):
        return 0


@pytest.mark.extended
def test_a_run_goes_on_without_a_silent_rank_and_with_another_and_is_pre_empted(tmp_path):
    """It ends with the parameters of a run that was stopped and started again at these steps, on as many ranks."""
    shutil.copy(HERE / "slow_samples.py", tmp_path)
    options = ["--run-dir", "run", "--elastic", "--hang-timeout", "10"]
    command = elastic(tmp_path, 2, "-m", "hvdtrain", *TRAIN, *options)
    with ElasticJob(command, cwd=tmp_path, PAUSE_S="0.004") as job:
        job.wait_for_step(30)
        job.send(0, signal.SIGSTOP)  # as silent as if its host were gone; it holds the lock on the run's folder
        lost = job.wait_for_world(2, 1)
        (tmp_path / "more").touch()
        come = job.wait_for_world(1, 2)
        job.wait_for_step(come + 10)
        job.send(1, signal.SIGTERM)
        assert job.wait(seconds=LIMIT_S) == 75, job.text[-6000:]
    # Which of the two hosts has rank 0 is chance.
    silent = r"horovodrun: the rank (localhost|127\.0\.0\.1)\[0\] has given no sign of life for \d+ s"
    assert re.search(silent, job.text), job.text[-6000:]
    end = int(re.search(r"SIGTERM: all ranks stop after step (\d+), to save it", job.text)[1])
    assert f"interrupted at step {end} of {STEPS}. Resume from step {end} with:" in job.text, "by rank 0 of now"
    assert 10 < lost < come < end < STEPS
    assert lost % 10 == come % 10 == 0

    resumed = resume(tmp_path, "run", "mpirun", 2, STEPS)
    for controller, size, last in (("mpirun", 2, lost), ("none", 1, come), ("mpirun", 2, STEPS)):
        stopped = resume(tmp_path, "stopped", controller, size, last)
    for name in ("parameter_hash", "steps", "val_loss", "train_loss", "best"):
        assert resumed[name] == stopped[name], name
    steps = [record["step"] for record in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open())]
    assert steps == sorted(steps), "a step that was taken again is recorded twice"


def resume(folder, run_folder, controller, size, steps):
    """Go on with a run until it has taken so many steps, and return its summary."""
    words = [*TRAIN, "--run-dir", run_folder, "--resume", "auto", "--max-steps", str(steps)]
    hvdtrain(controller, size, *words, cwd=folder, timeout=LIMIT_S)
    return summary_of(folder / run_folder)


def script(folder, ranks, name, *words, more=1):
    command = elastic(folder, ranks, str(HERE / name), *words, more=more)
    return Job(command, cwd=folder).expect(code=None, timeout=LIMIT_S)


def weights_in(folder, name):
    with np.load(folder / name) as file:
        return [file[each] for each in file.files]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What the script says of its end in one process, and the weights that it leaves."""
    folder = tmp_path_factory.mktemp("alone")
    job = Job(launched("none", 1, str(HERE / "train.py"), "alone", "alone"), cwd=folder).expect(timeout=LIMIT_S)
    (end,) = (json.loads(line) for line in re.findall(r"ENDED (\{.*\})", job.out))
    return end, weights_in(folder, "alone-0.npz")


EVERYWHERE = {"compiling", "in evaluation", "while it saves", "in a callback"}


@pytest.mark.xdist_group("elastic script")
# 40 s: each of three worlds starts and compiles anew, and one process trains the same.
@pytest.mark.parametrize(
    ("ranks", "more", "worlds", "places"),
    [(2, 1, "2 1 2", {"compiling"}), pytest.param(4, 2, "4 3 2 1 3 2", EVERYWHERE, marks=pytest.mark.extended)],
    ids=["2 ranks", "4 ranks"],
)
def test_a_script_that_loses_ranks_trains_as_one_process_does(tmp_path, alone, ranks, more, worlds, places):
    """Batches of 25 samples are divided unevenly; callbacks remember what they did. No first rank of four stays."""
    reference, expected = alone
    job = script(tmp_path, ranks, "train.py", "elastic", "lost", more=more)
    assert job.code == 0, job.text[-6000:]
    said = re.findall(r"elastic: (\d) ranks? before, (\d) now: goes on after step \d+$", job.out, re.MULTILINE)
    assert said == list(itertools.pairwise(worlds.split())), job.text
    assert {path.name for path in tmp_path.glob("lost-*")} == {f"lost-{place}" for place in places}
    ends = [json.loads(line) for line in re.findall(r"ENDED (\{.*\})", job.out)]
    assert len(ends) == 2
    epochs = [line.split(",")[0] for line in (tmp_path / "elastic.csv").read_text().splitlines()]
    assert list(dict.fromkeys(epochs)) == ["epoch", *map(str, range(len(reference["val_loss"])))], (
        "the file begins anew"
    )
    tracked = [line.split() for line in (tmp_path / "tracked").read_text().splitlines()]
    assert len({training for training, *_ in tracked}) == 1, "a run of its own for each world"
    assert {int(step) for _, step, *figures in tracked if "val_loss" in figures} == set(range(10, 81, 10))
    for end in ends:
        assert (end["steps"], end["result"]) == (reference["steps"], reference["result"]) == (80, 80)
        np.testing.assert_allclose(end["val_loss"], reference["val_loss"], rtol=1e-9)
        np.testing.assert_allclose(end["best"], reference["best"], rtol=1e-9)
    first, second = (weights_in(tmp_path, f"elastic-{rank}.npz") for rank in (0, 1))
    for ours, theirs, right in zip(first, second, expected, strict=True):
        assert (ours == theirs).all(), "the ranks drifted apart"
        np.testing.assert_allclose(ours, right, rtol=0, atol=1e-9 * np.abs(right).max())


@pytest.mark.extended
def test_a_mistake_in_the_users_code_ends_the_job(tmp_path):
    """Another world would only repeat it: its traceback is shown, once."""
    job = script(tmp_path, 2, "train.py", "elastic", "mistake")
    assert job.code == 1, job.text[-6000:]
    assert job.text.count("ValueError: a mistake of the user's own") == 1
    assert re.search(r"rank 1 \(.*\) failed:", job.text)
    assert "goes on after step" not in job.text


@pytest.mark.extended
def test_what_elastic_training_does_not_go_with_is_refused(tmp_path):
    job = script(tmp_path, 1, "refused.py")
    assert job.code == 0, job.text[-6000:]
    said = re.findall(r"(?:TRAINED|REFUSED .*)$", job.out, re.MULTILINE)
    expected = [
        "zero=1 does not go with elastic",
        "local_steps=2 does not go with elastic",
        "fit(shard='rank') does not go with elastic=True",
        "pass the function, not its generator",
        "commit_every must be at least 1. Received: 0",
        "TRAINED",
        "One fit of a script is elastic",
        "TRAINED",
    ]
    assert len(said) == len(expected), job.text[-6000:]
    for line, words in zip(said, expected, strict=True):
        assert words in line
        assert words == "TRAINED" or line.startswith("REFUSED")
