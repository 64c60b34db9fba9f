"""The distributed checks, for each controller and number of ranks; one launch for each of these pairs.

A launch runs the checks that pytest selected: `-k "mpirun-2 and parity"` is one launch of a few seconds.
"""

import functools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.battery import (
    CHECKS,
    EVERY_DAY_ON_FOUR_UNDER_GLOO,
    EVERYWHERE_UNDER_MPI,
    EXTENDED_ON_EIGHT,
    EXTENDED_ON_FOUR_UNDER_GLOO,
    EXTENDED_ON_TWO_UNDER_MPI,
    LONG_TO_COMPILE,
    ON_EIGHT_ALONE,
    OTHERS,
    SEVERAL_ON_A_HOST,
    check_names,
    checks_of,
    is_extended,
)
from tests.launching import has_launcher, launcher, run

WORLDS = [(controller, size, "auto") for size in (1, 2, 4) for controller in ("gloo", "mpirun")]
EIGHT = [("gloo", 8, "auto"), ("mpirun", 8, "auto")]
TF_KERAS = [("mpirun", 2, "tf_keras")]
STRATEGIES = [("none", 1, "mirrored"), ("mpirun", 2, "multi_worker_mirrored"), ("mpirun", 4, "parameter_server")]
ONE_PROCESS = [*WORLDS[:2], STRATEGIES[0]]
"""These leave a core free: they run side by side."""
QUICK = ("mpirun" if has_launcher("mpirun") else "gloo", 2, "auto")
EXTENDED = [("mpirun", 4, "auto"), *STRATEGIES[1:]]
"""`launch/test.sh` leaves these to `launch/test.sh --all`: four ranks train under Gloo, and replicas in one process."""
NOT_QUICK = LONG_TO_COMPILE | {"data_service", "rank_parts", "update_rules"}
"""`launch/test.sh --quick` runs the other files in this world."""
TIMEOUT_S = 1800
END = "the_job_ends_well"


def names_of(controller, size, backend):
    if backend == "auto":
        return checks_of(controller, size)
    return check_names(CHECKS / f"{OTHERS[backend]}.py")


@pytest.fixture(scope="session")
def battery(request, tmp_path_factory):
    """Return the outcome of a world's launch, which the first test of that world starts."""
    selected = {}
    for item in request.session.items:
        if item.originalname == "test_check":
            selected.setdefault(item.callspec.params["world"], []).append(item.callspec.params["name"])

    def run_world(controller, size, backend):
        folder = tmp_path_factory.mktemp(f"battery-{controller}-{size}-{backend}")
        results = folder / "results.json"
        script = Path(__file__).with_name("battery.py")
        names = [name for name in selected[controller, size, backend] if name != END]
        environ = {"TF_USE_LEGACY_KERAS": "1"} if backend == "tf_keras" else {}
        python = [sys.executable, str(script), str(results), str(folder), "auto" if environ else backend]
        job = run([*launcher(controller, size), *python, *names], cwd=folder, timeout=TIMEOUT_S, **environ)
        return job, json.loads(results.read_text()) if results.exists() else {}

    tmp_path_factory.getbasetemp()  # made once, not by each of the threads that ask for a folder in it
    with ThreadPoolExecutor() as pool:

        @functools.cache
        def launched(*world):
            return pool.submit(run_world, *world)

        def outcome(*world):
            for each in ONE_PROCESS if world in ONE_PROCESS else ():
                if each in selected:
                    launched(*each)
            return launched(*world).result()

        yield outcome


def marks_of(world, name):
    if world in EXTENDED or (world[2] == "auto" and name != END and is_extended(name, *world[:2])):
        return [pytest.mark.extended]
    is_quick = world == QUICK and name.split(".")[0] not in NOT_QUICK
    return [pytest.mark.quick] if is_quick else []


CASES = [
    pytest.param(world, name, id=f"{world[0]}-{world[1]}-{world[2]}-{name}", marks=marks_of(world, name))
    for world in [*ONE_PROCESS, *WORLDS[2:], *EIGHT, *TF_KERAS, *STRATEGIES[1:]]
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
    files = [file for file in CHECKS.glob("*.py") if file.stem not in ON_EIGHT_ALONE.union(OTHERS.values())]
    needing_four = {name for file in files if file.stem in SEVERAL_ON_A_HOST for name in check_names(file)}
    everything = {name for file in files for name in check_names(file)}
    assert set(checks_of("mpirun", 2)) == everything - needing_four
    assert {*checks_of("gloo", 4), *checks_of("mpirun", 4)} >= needing_four
    on_eight = {name for file in ON_EIGHT_ALONE for name in check_names(CHECKS / f"{file}.py")}
    under_both = {*checks_of("gloo", 8), *checks_of("mpirun", 8)}
    assert everything >= under_both - on_eight
    assert under_both >= on_eight >= EXTENDED_ON_EIGHT
    files_of_checks = everything | {name.split(".")[0] for name in everything}
    assert files_of_checks >= EVERY_DAY_ON_FOUR_UNDER_GLOO | EXTENDED_ON_FOUR_UNDER_GLOO | EXTENDED_ON_TWO_UNDER_MPI
    assert all(set(checks_of("mpirun", size)) >= EVERYWHERE_UNDER_MPI for size in (1, 2, 4))
