"""The Python of the documentation runs as printed, each page from its top to its bottom, and trains."""

import json
import re
from collections import defaultdict

import pytest

from tests.entry.docs.pages import PAGES, ROOT, blocks_of
from tests.launching import Job, launched

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("docs")]  # they share a launch

ELSEWHERE = {
    "docs/backends.md": "several replicas in one process, without a launcher: test_commands.py",
    "docs/migration.md": "each block is a script of its own: tests/entry/test_migration.py",
    "docs/options.md": "files of a package, trained by a command: test_commands.py",
    "docs/export.md": "loads what its commands wrote: test_commands.py",
    "docs/after_training.md": "loads what its commands trained: test_commands.py",
}
RUN_HERE = [page for page in PAGES if page not in ELSEWHERE and blocks_of(page, "python")]
SIZE = 2


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """All pages, one after the other, on 2 ranks."""
    folder = tmp_path_factory.mktemp("pages")
    command = launched("mpirun", SIZE, "-m", "tests.entry.docs.run_pages", *RUN_HERE)
    return Job(command, cwd=folder, PYTHONPATH=str(ROOT)).expect(code=None, timeout=600)


@pytest.fixture(scope="module")
def reports(job):
    """What the ranks printed, by the place of a block."""
    assert job.code == 0, job.text[-4000:]
    found = defaultdict(list)
    for line in re.findall(r"BLOCK (\{.*\})", job.out):
        report = json.loads(line)
        found[report["place"]].append(report)
    return found


def test_every_block_runs_on_every_rank(reports):
    expected = [b.place for page in RUN_HERE for b in blocks_of(page, "python") if not (b.file or b.not_run)]
    assert sorted(reports) == sorted(expected)
    assert all(len(of_ranks) == SIZE for of_ranks in reports.values())


def test_the_ranks_hold_the_same_weights(reports):
    compared = 0
    for place, (first, second) in reports.items():
        for name in first["hashes"].keys() & second["hashes"].keys():
            assert first["hashes"][name] == second["hashes"][name], f"{name} differs by rank after {place}"
            compared += 1
    assert compared >= len(reports)


def test_every_fit_lowers_the_validation_loss(reports):
    fits = [(place, losses) for place, (first, _) in reports.items() for losses in first["fits"]]
    losses = [(place, losses) for place, losses in fits if len(losses) > 1]  # the others have no validation data
    assert len(losses) >= 6
    for place, (before, *_, after) in losses:
        assert after < before, place


def test_every_loop_lowers_its_loss(job):
    loops = re.findall(r"^loss (\S+) -> (\S+)", job.out, re.MULTILINE)
    calls = "".join(block.text for block in blocks_of("docs/own_loops.md", "python"))
    assert len(loops) == len(re.findall(r"^train\(", calls, re.MULTILINE)) >= 8
    for before, after in loops:
        assert float(after) < 0.5 * float(before)


def test_the_pages_warn_of_nothing(job):
    lines = re.findall(r".*(?:WARNING|warning:|DeprecationWarning).*", job.text)
    # One process runs what a reader runs as several scripts, and the machine may be busy.
    harmless = (
        "before absl::InitializeLog",
        "triggered tf.function retracing",
        "steps wait for data",
        "is slower than the others",
        "is skipped: NaN",
        "needs samples of other ranks",
    )
    assert [line for line in lines if not any(text in line for text in harmless)] == []
