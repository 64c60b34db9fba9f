"""The distributed checks, for each controller and number of ranks; one launch for each of these pairs."""

import functools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.battery import CHECKS, MPI_ONLY, OF_TF_DISTRIBUTE, TWO_RANKS_ONLY, check_names, checks_of
from tests.launching import launcher, run

WORLDS = [(controller, size, "auto") for size in (1, 2, 4) for controller in ("gloo", "mpirun")]
STRATEGIES = [("none", 1, "mirrored"), ("mpirun", 2, "multi_worker_mirrored")]
TIMEOUT_S = 900
END = "the_job_ends_well"


def names_of(controller, size, backend):
    if backend == "auto":
        return checks_of(controller, size)
    return check_names(CHECKS / f"{OF_TF_DISTRIBUTE}.py")


@pytest.fixture(scope="session")
def battery(tmp_path_factory):
    """Return what a world's launch came to; the first test of a world launches it."""

    def run_world(controller, size, backend):
        folder = tmp_path_factory.mktemp(f"battery-{controller}-{size}-{backend}")
        results = folder / "results.json"
        script = Path(__file__).with_name("battery.py")
        python = [sys.executable, str(script), str(results), str(folder), backend]
        names = names_of(controller, size, backend)
        job = run([*launcher(controller, size), *python, *names], cwd=folder, timeout=TIMEOUT_S)
        return job, json.loads(results.read_text()) if results.exists() else {}

    with ThreadPoolExecutor() as pool:

        @functools.cache
        def launched(*world):
            return pool.submit(run_world, *world)

        def outcome(*world):
            _, size, backend = world
            if (size, backend) == (1, "auto"):  # one rank leaves a core free: these two worlds run side by side
                for each in WORLDS[:2]:
                    launched(*each)
            return launched(*world).result()

        yield outcome


CASES = [
    pytest.param(world, name, id=f"{world[0]}-{world[1]}-{world[2]}-{name}")
    for world in [*WORLDS, *STRATEGIES]
    for name in [*names_of(*world), END]
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
