"""The MPI library: loaded once, and the one that the job's launcher belongs to."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.compat.horovod import bind_mpi_at_once, load_mpi_library
from hvdtrain.config.errors import LaunchError, LoneRanksError
from hvdtrain.runtime.inherited import claim_rank
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.terminal import say

_LONGEST_VERSION = 8192
"""MPI_MAX_LIBRARY_VERSION_STRING of all MPIs."""

_OPEN_MPI, _MPICH = "Open MPI", "MPICH"
_FAMILIES = {"mpirun": _OPEN_MPI, "horovodrun": _OPEN_MPI, "mpiexec": _MPICH, "mpirun_rsh": _MPICH}
"""The MPI of a launcher; MPICH's ABI is also that of Intel, Cray and MVAPICH."""


def load_mpi(environment: Environment) -> Any:
    """Return mpi4py's MPI module, initialised and checked against what the launcher said.

    Raises:
        LaunchError: mpi4py is missing, or MPI was initialised without threads.
        LoneRanksError: MPI counts other ranks than the launcher.
    """
    try:
        _bind_at_once()
        prepare_mpi(environment)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{environment.launcher} started this job over MPI, but mpi4py cannot be loaded ({error}). "
            "Run: python -m hvdtrain setup"
        ) from error
    told, seen = (environment.rank, environment.size), (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    if told != seen:
        library = _short(MPI.Get_library_version())
        raise LoneRanksError(
            f"{environment.launcher} started this process as rank {told[0]} of {told[1]}, but MPI ({library}) sees "
            f"rank {seen[0]} of {seen[1]}: the launcher belongs to another MPI than the one that mpi4py loads, or "
            "lacks its plugin (srun --mpi=pmix). Each would train a model of its own. Start them with its own mpirun, "
            "or with horovodrun --gloo; with another MPI, build Horovod for it: python -m hvdtrain setup --mpi system.",
            rank=environment.local_rank,
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise LaunchError(
            "MPI was initialised without MPI_THREAD_MULTIPLE, which Horovod and hvdtrain need side by side. "
            "Import hvdtrain first, or initialise mpi4py with its default threads."
        )
    return MPI


def _bind_at_once() -> None:
    """Have the MPI library's symbols resolved when it is loaded, not when each is first called.

    TensorFlow exports the functions of the hwloc that it holds. An MPI that is loaded before it, and whose own
    hwloc functions are looked up later, would hand its topology to TensorFlow's and crash in MPI_Finalize.
    """
    bind_mpi_at_once(os.RTLD_NOW | os.RTLD_GLOBAL)


def prepare_mpi(environment: Environment, environ: Mapping[str, str] = os.environ) -> None:
    """Check, before MPI_Init, that the job's launcher, this process and the MPI library belong together.

    MPI_Init would abort without a word about the cause, wait forever, or make each process a job of its own.

    Raises:
        LoneRanksError: they do not.
    """
    if environment.controller != "mpi":
        return
    claim_rank(environ)
    library = _library()
    if library is None:
        return
    family, version = library
    _refuse_other_library(environment, family, version)
    if family == _MPICH:
        _refuse_closed_pmi(environ)
    elif environment.launcher == "srun" and "PMIX_RANK" not in environ:
        _refuse_open_mpi_without_pmi(environment, version)
    of_launcher = environ.get("OMPI_VERSION", "")
    if environment.rank == 0 and of_launcher and f"v{of_launcher.partition('.')[0]}." not in version:
        say(f"hvdtrain: warning: mpirun is Open MPI {of_launcher}, Python loads {version}: they may not work together.")


def _refuse_other_library(environment: Environment, family: str, version: str) -> None:
    wanted = _FAMILIES.get(environment.launcher)
    if wanted not in (None, family):
        raise LoneRanksError(
            f"{environment.launcher} belongs to {wanted} (or an MPI like it), and Python loads {version}: they do "
            f"not work together. Start the ranks with the mpirun of {family}, or horovodrun --gloo; to use {wanted}, "
            "build Horovod for it: python -m hvdtrain setup --mpi system.",
            rank=environment.local_rank,
        )


def _refuse_closed_pmi(environ: Mapping[str, str]) -> None:
    """Check that the connection to the launcher is open, which a child started by Python's subprocess lacks."""
    number = environ.get("PMI_FD", "")
    if number.isdecimal() and not os.path.exists(f"/proc/self/fd/{number}"):
        raise LoneRanksError(
            "The launcher did not start this process, which has inherited the variables of a rank, but not the rank's "
            f"connection to the launcher. Received: PMI_RANK={environ.get('PMI_RANK')}, PMI_FD={number}, which is "
            'closed. To train in one process, unset "${!PMI_@}" in bash; a script between mpiexec and python must keep '
            "file descriptors open (subprocess: close_fds=False).",
            rank=0,
        )


def _refuse_open_mpi_without_pmi(environment: Environment, version: str) -> None:
    """Check that Open MPI can join the ranks of `srun --mpi=pmi2`: few builds of Open MPI 4 can, and none of 5."""
    info = shutil.which("ompi_info", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if info is None:
        return
    components = subprocess.run([info, "--parsable"], capture_output=True, text=True, check=False).stdout
    if "mca:" in components and not any(f"mca:pmix:{pmi}:" in components for pmi in ("s1", "s2", "cray")):
        raise LoneRanksError(
            f"srun started the ranks with PMI, as srun --mpi=pmi2 does, and {version} was built without it: MPI_Init "
            "would abort. Use srun --mpi=pmix, if srun --mpi=list shows it, or mpirun inside the allocation, or "
            "python -m hvdtrain launch, which chooses.",
            rank=environment.rank,
        )


def _library() -> tuple[str, str] | None:
    """Return family and version of the MPI library that mpi4py loads; None where that cannot be told."""
    try:
        library = load_mpi_library()
        text, length = ctypes.create_string_buffer(_LONGEST_VERSION), ctypes.c_int()
        library.MPI_Get_library_version(text, ctypes.byref(length))
    except (ImportError, AttributeError, RuntimeError, OSError):
        return None
    family = _OPEN_MPI if hasattr(library, "ompi_mpi_comm_self") else _MPICH
    return family, _short(text.value.decode(errors="replace"))


def _short(version: str) -> str:
    """Return name and number of a library's version, which may fill many lines."""
    return " ".join(version.splitlines()[0].split(",")[0].replace("Version:", " ").split())
