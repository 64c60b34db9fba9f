"""Jobs over MPI of which ranks are lost: by asynchronous rules the others go on."""

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.launching import Job, launched

SCRIPT = Path(__file__).parent / "elastic_jobs" / "apart.py"
LIMIT_S = 240
STEPS = 200


def train(folder, ranks, **given):
    """Run the script; mpirun's exit code says nothing with --enable-recovery."""
    words = [str(SCRIPT), json.dumps({"lost": {}, **given})]
    command = launched("mpirun" if ranks else "none", ranks, *words, options=["--enable-recovery"] if ranks else [])
    return Job(command, cwd=folder).expect(code=None if ranks else 0, timeout=LIMIT_S)


def ends_of(job):
    return [json.loads(line) for line in re.findall(r"ENDED (\{.*\})", job.out)]


def weights_in(folder, rank=0):
    with np.load(folder / f"weights-{rank}.npz") as file:
        return [file[each] for each in file.files]


def worlds_of(job):
    return re.findall(r"elastic: (\d) ranks? before, (\d) now: goes on after step (\d+)$", job.out, re.MULTILINE)


def test_the_last_worker_goes_on_from_the_commit_as_one_process_does(tmp_path):
    """Its optimizer's slots lay on two servers, and half of them were lost with rank 0."""
    job = train(tmp_path, 2, options={"update": "async"}, elastic=True, lost={"0": 70})
    assert worlds_of(job) == [("2", "1", "50")], job.text[-6000:]
    assert re.search(r"rank 0 \(.*\) is lost: the process has ended", job.text)
    (end,) = ends_of(job)
    assert (end["rank"], end["size"], end["steps"]) == (0, 1, STEPS)
    (commit,) = (tmp_path / "saved").glob("step-*0050")
    shutil.copytree(commit, tmp_path / "from" / commit.name)
    alone = tmp_path / "alone"
    alone.mkdir()
    (resumed,) = ends_of(train(alone, 0, resume=str(tmp_path / "from")))
    assert resumed["val_loss"] == end["val_loss"]
    for ours, right in zip(weights_in(tmp_path), weights_in(alone), strict=True):
        np.testing.assert_array_equal(ours, right)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("options", "lost", "worlds"),
    [
        ({"update": "async", "servers": 1}, {"1": 70}, "3 2"),
        ({"update": "async", "servers": 1}, {"2": 70}, "3 2"),
        ({"update": "async"}, {"1": 70, "2": 130}, "3 2 1"),
        ({"update": "async", "compensation": "dc_asgd", "max_staleness": 2}, {"2": 70}, "3 2"),
        ({"update": "gossip"}, {"0": 70}, "3 2"),
        ({"update": "gossip", "push_sum": True, "gossip_graph": "exponential"}, {"1": 70}, "3 2"),
        ({"update": "easgd", "local_steps": 2}, {"2": 70}, "3 2"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_the_others_go_on_without_a_lost_rank(tmp_path, options, lost, worlds):
    job = train(tmp_path, 3, options=options, elastic=True, lost=lost)
    sizes = worlds.split()
    assert [told[:2] for told in worlds_of(job)] == list(itertools.pairwise(sizes)), job.text[-6000:]
    ends = ends_of(job)
    assert sorted(end["rank"] for end in ends) == list(range(int(sizes[-1])))
    assert all(end["steps"] == STEPS and end["val_loss"][-1] < 0.2 for end in ends)
    for rank in range(1, int(sizes[-1])):
        for ours, theirs in zip(weights_in(tmp_path, rank), weights_in(tmp_path), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.extended
@pytest.mark.parametrize("elastic", [True, False])
def test_a_job_that_needs_all_ranks_ends_and_names_the_lost_one(tmp_path, elastic):
    """An all-reduce waits within MPI for all ranks; so does an asynchronous training that is not to go on."""
    options = {"update": "async"} if not elastic else {}
    job = train(tmp_path, 2, options=options, elastic=elastic, lost={"1": 70})
    if elastic:
        assert "elastic over MPI needs ranks that train apart: update='async', gossip or easgd" in job.text
        return
    said = re.findall(r"error: rank 1 \(.*\) is lost, and the job needs all of its ranks", job.text)
    assert len(said) == 1, job.text[-6000:]
    assert not ends_of(job)
