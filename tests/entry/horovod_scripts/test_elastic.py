"""Elastic scripts of Horovod's users: one of two ranks is killed, later another one comes, and the rate follows."""

import json
import re

import pytest

from tests.entry.horovod_scripts.rewriting import HERE, environment_of, write_scripts
from tests.launching import Job, launched

pytestmark = pytest.mark.extended

JOBS = [
    ("keras_3", "keras_mnist_elastic", "--steps 16 --epochs 4"),
    ("tf_keras", "keras_mnist_elastic", "--steps 16 --epochs 4"),
    ("keras_3", "mnist_elastic", "--batches 40"),
    ("tf_keras", "mnist_elastic", "--batches 40"),
    ("keras_3", "variables_elastic", "--batches 40"),
]
# Three names of this machine: the host whose rank was killed is not used again.
HOSTS = "echo localhost:1; echo 127.0.0.1:1; if test -e more; then echo 127.1:1; fi"


def elastic_job(folder, flavour, script, arguments):
    write_scripts("elastic", flavour, folder)
    discover = folder / "discover.sh"
    discover.write_text(f"#!/bin/sh\n{HOSTS}\n")
    discover.chmod(0o755)
    options = ["--min-np", "1", "--max-np", "2", "--network-interfaces", "lo", "--host-discovery-script", str(discover)]
    words = [str(HERE / "run_elastic.py"), str(folder / f"{script}.py"), *arguments.split()]
    command = launched("gloo", 2, *words, options=options)
    # Horovod cannot read a cycle time twice: without the face it would crash in the reset.
    return Job(command, cwd=folder, HOROVOD_CYCLE_TIME="0.5", **environment_of(flavour)).expect(code=None, timeout=600)


@pytest.mark.parametrize(("flavour", "script", "arguments"), JOBS, ids=lambda value: value.split()[0])
def test_a_rank_is_lost_and_another_one_comes(tmp_path, flavour, script, arguments):
    job = elastic_job(tmp_path, flavour, script, arguments)
    assert job.code == 0, job.text[-6000:]
    ends = [json.loads(line) for line in re.findall(r"ENDED (\{.*\})", job.out)]
    assert sorted(end["rank"] for end in ends) == [0, 1], job.text[-6000:]
    first, second = ends
    assert first["sizes"] == second["sizes"]
    before, alone, after = re.fullmatch("(2+)(1+)(2+)", "".join(map(str, first["sizes"]))).groups()
    assert min(len(before), len(alone), len(after)) >= 1
    assert first["weights"] == second["weights"], "the ranks drifted apart"
    for end in ends:
        assert end["rates"] == end["expected_rates"], "a reset callback had no effect"
