"""The machine that was measured. No TensorFlow."""

import os
import re
import shutil
from collections.abc import Mapping
from typing import Any

from hvdtrain.runtime.diagnosis.machine import first_line
from hvdtrain.runtime.report import collect_environment, nvidia_gpus


def environment() -> dict[str, Any]:
    """Return versions, machine, GPUs, MPI and environment variables."""
    mpirun = shutil.which("mpirun")
    facts = {"gpus": nvidia_gpus(), "mpi": {"mpirun": first_line([mpirun, "--version"]) if mpirun else None}}
    found = collect_environment() | facts
    # Reports may be published: leave out personal paths.
    del found["python"]["executable"]
    return found


def host_class(facts: Mapping[str, Any]) -> str:
    """Return the class of the machine, as part of a folder name: 2-cores, 16-cores-1-nvidia-h200."""
    name = f"{facts['machine']['usable_cores']}-cores"
    gpus = facts["gpus"]
    if gpus:
        model = re.sub(r"[^a-z0-9]+", "-", gpus[0].split(",")[0].lower()).strip("-")
        name += f"-{len(gpus)}-{model}"
    return name


def default_ranks(cores_per_rank: int) -> list[int]:
    """Return 2, 4, 8 … ranks, as many as have cores of their own; at least 2."""
    room = len(os.sched_getaffinity(0)) // cores_per_rank
    return [2**power for power in range(1, 12) if 2**power <= max(2, room)]
