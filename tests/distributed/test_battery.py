"""Every distributed check, for each controller and number of ranks; one launch for each of these pairs."""

import json
import sys
from pathlib import Path

import pytest

from tests.distributed.battery import check_names
from tests.launching import launcher, run

WORLDS = [(controller, size) for controller in ("gloo", "mpirun") for size in (1, 2, 4)]
TIMEOUT_S = 560


@pytest.fixture(scope="session", params=WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def outcome(request, tmp_path_factory):
    controller, size = request.param
    folder = tmp_path_factory.mktemp(f"battery-{controller}-{size}")
    results = folder / "results.json"
    script = Path(__file__).with_name("battery.py")
    job = run(
        [*launcher(controller, size), sys.executable, str(script), str(results), str(folder)],
        cwd=folder,
        timeout=TIMEOUT_S,
    )
    return job, json.loads(results.read_text()) if results.exists() else {}


@pytest.mark.parametrize("name", check_names())
def test_check(outcome, name):
    job, results = outcome
    if name not in results:
        pytest.fail(f"the job ended before this check (code {job.code}):\n{job.text[-4000:]}")
    if results[name]["failure"]:
        pytest.fail(results[name]["failure"])


def test_job_ends_well(outcome):
    job, results = outcome
    assert job.code == 0, job.text[-4000:]
    assert set(results) == set(check_names())
