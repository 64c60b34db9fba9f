"""The distributed checks in their worlds; one launch for each world, or for every 80 checks of it.

A launch runs the checks that pytest selected: `-k "mpirun-2 and parity"` is one launch of a few seconds.
"""

import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.worlds import WORLDS, all_checks
from tests.launching import Job, launched

LAUNCH_S, CHECK_S = 1800.0, 60.0
"""Bounds of a launch, and of one of its checks on average; those of all classes of Keras take minutes each."""
AT_ONCE = 80
"""Checks of a launch, at most: Keras gives the memory of a trained model back to nobody, some 12 MB of a small one."""
ENDS = 3
"""Of jobs of one world, after which no other is launched."""
END = "the_job_ends_well"
ONE_PROCESS = [name for name, launch in WORLDS.items() if launch.size == 1]
"""These leave a core free: they run side by side."""


@pytest.fixture(scope="session")
def battery(request, tmp_path_factory):
    """Return the outcome of a world's launch, which the first test of that world starts."""
    selected = {}
    for item in request.session.items:
        if item.originalname == "test_check":
            selected.setdefault(item.callspec.params["world"], []).append(item.callspec.params["name"])

    def run_world(world):
        """Run the checks of a world; those that follow one in which the job ended run in another launch."""
        launch = WORLDS[world]
        rest = [name for name in selected[world] if name != END]
        outcomes, around, jobs, ended = {}, 0.0, [], 0
        while rest and ended < ENDS:
            part = rest[:AT_ONCE]
            folder = tmp_path_factory.mktemp(f"battery-{world}")
            results = folder / "results.json"
            script = str(Path(__file__).with_name("battery.py"))
            places = [str(results), str(folder), str(references), launch.backend]
            command = launched(launch.controller, launch.size, script, *places, *part)
            limit = LAUNCH_S + CHECK_S * len(part)
            begin = time.perf_counter()
            with Job(command, cwd=folder, **launch.environ) as job:  # those before one that hangs have their results
                job.wait(seconds=limit)
            jobs.append(job)
            found = json.loads(results.read_text()) if results.exists() else {}
            # What the checks did not take is the start and the end of the job.
            around += time.perf_counter() - begin - sum(each["seconds"] for each in found.values())
            outcomes |= found
            left = [name for name in part if name not in found]
            if left:
                said = f"the job ended in this check (code {job.code}):\n{job.text[-8000:]}"
                outcomes[left[0]] = {"seconds": 0.0, "failure": said}
                ended += 1
            rest = [name for name in rest if name not in outcomes]
        return next((job for job in jobs if job.code), jobs[-1]), {**outcomes, END: {"seconds": around, "failure": ""}}

    # Both are made here, not by each of the threads that ask for them.
    references = tmp_path_factory.mktemp("references")
    with ThreadPoolExecutor() as pool:

        @functools.cache
        def running(world):
            return pool.submit(run_world, world)

        def outcome(world):
            for each in ONE_PROCESS if world in ONE_PROCESS else ():
                if each in selected:
                    running(each)
            return running(world).result()

        yield outcome


def cases():
    """Each check in each of its worlds, and the end of each launch, which is extended where all of its checks are."""
    checks = all_checks()
    for world in WORLDS:
        here = {check.name: check.extended[world] for check in checks if world in check.extended}
        for name, extended in {**here, END: all(here.values())}.items():
            marks = [pytest.mark.extended] if extended else []
            yield pytest.param(world, name, id=f"{world}-{name}", marks=marks)


@pytest.mark.parametrize(("world", "name"), list(cases()))
def test_check(battery, record_property, world, name):
    job, results = battery(world)
    record_property("seconds", results.get(name, {"seconds": 0.0})["seconds"])
    if name == END:
        assert job.code == 0, job.text[-4000:]
        return
    if name not in results:
        pytest.fail(f"the job ended before this check (code {job.code}):\n{job.text[-4000:]}")
    if results[name]["failure"]:
        pytest.fail(results[name]["failure"])
