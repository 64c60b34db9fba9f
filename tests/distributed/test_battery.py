"""The distributed checks, for each controller and number of ranks; one launch for each of these pairs."""

import functools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.battery import MPI_ONLY, TWO_RANKS_ONLY, checks_of
from tests.launching import launcher, run

CONTROLLERS = ("gloo", "mpirun")
WORLDS = [(controller, size) for size in (1, 2, 4) for controller in CONTROLLERS]
TIMEOUT_S = 560
END = "the_job_ends_well"


@pytest.fixture(scope="session")
def battery(tmp_path_factory):
    """Return what a world's launch came to; the first test of a world launches it."""

    def run_world(controller, size):
        folder = tmp_path_factory.mktemp(f"battery-{controller}-{size}")
        results = folder / "results.json"
        script = Path(__file__).with_name("battery.py")
        python = [sys.executable, str(script), str(results), str(folder)]
        names = checks_of(controller, size)
        job = run([*launcher(controller, size), *python, *names], cwd=folder, timeout=TIMEOUT_S)
        return job, json.loads(results.read_text()) if results.exists() else {}

    with ThreadPoolExecutor() as pool:

        @functools.cache
        def launched(controller, size):
            return pool.submit(run_world, controller, size)

        def outcome(controller, size):
            if size == 1:  # one rank leaves a core free: these two worlds run side by side
                for each in CONTROLLERS:
                    launched(each, size)
            return launched(controller, size).result()

        yield outcome


CASES = [
    pytest.param(world, name, id=f"{world[0]}-{world[1]}-{name}")
    for world in WORLDS
    for name in [*checks_of(*world), END]
]


@pytest.mark.parametrize(("world", "name"), CASES)
def test_check(battery, world, name):
    job, results = battery(*world)
    if name == END:
        assert job.code == 0, job.text[-4000:]
        return
    if name not in results:
        pytest.fail(f"the job ended before this check (code {job.code}):\n{job.text[-4000:]}")
    if results[name]["failure"]:
        pytest.fail(results[name]["failure"])


def test_what_is_left_out_elsewhere_is_there():
    assert set(checks_of("mpirun", 2)) & set(checks_of("gloo", 2)) >= TWO_RANKS_ONLY
    assert all(set(checks_of("mpirun", size)) >= MPI_ONLY for size in (1, 2, 4))
