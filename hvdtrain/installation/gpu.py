"""Choose Horovod's GPU support: NCCL with a CUDA compiler, or CPU only."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hvdtrain.config.errors import SetupError
from hvdtrain.installation.steps import output_of, say, short_hash
from hvdtrain.runtime.diagnosis.diagnose import TENSORFLOW
from hvdtrain.runtime.python_environment import PythonEnvironment

Choice = Literal["auto", "nccl", "none"]
CHOICES: tuple[str, ...] = get_args(Choice)

PYPI_COMPILER = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
"""NVIDIA's compiler from PyPI, used if the machine has none.

PyPI has no complete one for CUDA 12, and this one's output needs a driver for CUDA 13: its first release needs the
oldest such driver.
"""
PYPI_CUDA = 13

OLDEST_CUDA = 11
"""Horovod's few kernels compile with any later release; TensorFlow's own libraries are for CUDA 12."""

NCCL_PACKAGE = "nvidia-nccl-cu12"
"""The NCCL that tensorflow[and-cuda] installs, so that TensorFlow and Horovod share one."""

CUSOLVER = Path("nvidia/cusolver/lib/libcusolver.so.11")
SEARCHED = Path("nvidia/cusparse/lib")
"""A folder that TensorFlow searches for CUDA's libraries. Of PyPI's it misses one: libtensorflow_framework.so, which
loads them all, has no cuSOLVER on its RUNPATH in 2.21, and so TensorFlow finds no GPU.
"""

_CUDA_PACKAGES = f"pip install 'tensorflow[and-cuda]~={TENSORFLOW}.0'"


@dataclass(frozen=True)
class Gpu:
    """GPU configuration of a build."""

    kind: Literal["nccl", "none"]
    compiler: Path | None = None
    """Folder of the CUDA toolkit with ``bin/nvcc``; None uses the compiler from PyPI."""
    nccl: Path | None = None
    """Folder with ``include/nccl.h`` and ``lib``."""
    capabilities: tuple[str, ...] = ()
    """Compute capabilities to compile for, such as 90; empty: all that the compiler supports."""
    identity: str = ""
    """Cache key of the GPU configuration; empty without NCCL."""


def choose_gpu(choice: str, environment: PythonEnvironment, environ: Mapping[str, str]) -> Gpu:
    """Resolve the user's choice; `auto` needs a driver with GPUs and TensorFlow's CUDA libraries for NCCL.

    If HOROVOD_GPU_OPERATIONS or a related variable is set, it is passed to the build unchanged. Raises SetupError for
    unknown choice; or NCCL is requested, but its library or a CUDA compiler that fits the driver is missing.
    """
    if choice not in CHOICES:
        raise SetupError(f"GPUs must be one of {', '.join(CHOICES)} (--gpu, HVDTRAIN_GPU). Received: {choice!r}.")
    nccl = _nccl_folder(environment, environ)
    by_hand = any(re.match(r"HOROVOD_GPU(_|$)", name) for name in environ)
    if choice == "none" or (choice == "auto" and (by_hand or nccl is None or not driver_shows_gpus(environ))):
        return Gpu("none")
    if nccl is None:
        raise SetupError(f"Horovod reduces on GPUs with NCCL. Received: no {NCCL_PACKAGE}. Run: {_CUDA_PACKAGES}")
    compiler = find_compiler(environ)
    version = compiler_version(compiler) if compiler else str(PYPI_CUDA)
    cuda, driver = int(version.partition(".")[0]), driver_cuda(environ)
    if driver is not None and cuda > driver[0]:
        where = str(compiler) if compiler else "only the compiler that PyPI has"
        raise SetupError(
            f"Horovod's kernels must be compiled by a CUDA toolkit that the driver runs, here CUDA {driver[0]} or "
            f"older. Received: CUDA {cuda} ({where}). Name one by HOROVOD_CUDA_HOME (module load cuda/{driver[0]}, or "
            f"conda install -c nvidia cuda-nvcc={driver[0]} cuda-cudart-dev={driver[0]}), update the driver, or build "
            "for CPUs: --gpu none."
        )
    if chosen := environ.get("HOROVOD_BUILD_CUDA_CC_LIST"):
        capabilities = tuple(chosen.split(","))
    else:  # this machine's
        shown = _nvidia_smi(environ, "--query-gpu=compute_cap", "--format=csv,noheader").decode()
        pairs = re.findall(r"^(\d+)\.(\d)$", shown, flags=re.MULTILINE)
        capabilities = tuple(sorted({f"{major}{minor}" for major, minor in pairs}))
    header = short_hash((nccl / "include" / "nccl.h").read_bytes())
    identity = f"nccl{header}-cuda{version}-{'.'.join(capabilities) or 'all'}"
    return Gpu(kind="nccl", compiler=compiler, nccl=nccl, capabilities=capabilities, identity=identity)


def link_cusolver(environment: PythonEnvironment) -> None:
    """Let TensorFlow find PyPI's cuSOLVER: link it into a folder that it searches, or say how else. Idempotent."""
    packages = [environment.distribution(name) for name in ("nvidia-cusolver-cu12", "nvidia-cusparse-cu12")]
    solver, sparse = (
        Path(str(package.locate_file(path))) if package else None
        for package, path in zip(packages, (CUSOLVER, SEARCHED), strict=True)
    )
    if solver is None or sparse is None or (sparse / solver.name).exists():
        return
    try:
        (sparse / solver.name).unlink(missing_ok=True)
        (sparse / solver.name).symlink_to(os.path.relpath(solver, sparse))
    except OSError as error:
        say(
            f"TensorFlow {TENSORFLOW} does not find cuSOLVER, and so no GPU ({error}): start jobs with "
            f"LD_LIBRARY_PATH={solver.parent}"
        )


def _nccl_folder(environment: PythonEnvironment, environ: Mapping[str, str]) -> Path | None:
    """Return the NCCL folder: HOROVOD_NCCL_HOME, else TensorFlow's."""
    packages = environment.distribution(NCCL_PACKAGE)
    found = [Path(environ["HOROVOD_NCCL_HOME"])] if environ.get("HOROVOD_NCCL_HOME") else []
    found += [Path(str(packages.locate_file("nvidia/nccl")))] if packages else []
    return next((folder for folder in found if (folder / "include" / "nccl.h").exists()), None)


def driver_shows_gpus(environ: Mapping[str, str]) -> bool:
    """Return whether an NVIDIA driver is loaded and lists a GPU."""
    return b"GPU " in _nvidia_smi(environ, "-L")


def driver_cuda(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the newest CUDA release the driver supports, such as (12, 4); None without a driver."""
    match = re.search(rb"CUDA Version\s*:\s*(\d+)\.(\d+)", _nvidia_smi(environ))
    return (int(match[1]), int(match[2])) if match else None


def _nvidia_smi(environ: Mapping[str, str], *words: str) -> bytes:
    return output_of(["nvidia-smi", *words], PATH=environ["PATH"])


def find_compiler(environ: Mapping[str, str]) -> Path | None:
    """Return this machine's usable CUDA toolkit, or None."""
    for folder in _toolkits(environ):
        # Without headers it is not a toolkit: its `bin/nvcc` is a wrapper script.
        headers = (next(folder.glob(f"{where}include/cuda_runtime.h"), None) for where in ("", "targets/*/"))
        if any(headers) and compiler_version(folder):
            return folder
    return None


def _toolkits(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield candidate toolkit folders, user-specified ones first."""
    named = (environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"))
    yield from (Path(folder) for folder in named if folder)
    if nvcc := shutil.which("nvcc", path=environ["PATH"]):
        yield Path(os.path.realpath(nvcc)).parent.parent
    yield Path("/usr/local/cuda")


def compiler_version(folder: Path) -> str:
    """Return a toolkit's compiler release, such as 12.9; empty if missing or too old."""
    match = re.search(rb"release (\d+)\.(\d+)", output_of([str(folder / "bin" / "nvcc"), "--version"]))
    return f"{int(match[1])}.{int(match[2])}" if match and int(match[1]) >= OLDEST_CUDA else ""
