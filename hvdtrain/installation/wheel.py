"""Build Horovod's wheel for this environment, or reuse a cached one."""

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.installation.gpu import Gpu
from hvdtrain.installation.mpi import Mpi
from hvdtrain.installation.steps import output_of, say, short_hash
from hvdtrain.runtime.horovod_patches import patched_version, series_hashes
from hvdtrain.runtime.python_environment import PythonEnvironment

TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu")

_BUILD_SETTING = re.compile(r"HOROVOD_(GPU|NCCL|CUDA|ROCM|ALLOW_MIXED|BUILD)")
"""Variables that affect the build: HOROVOD_GPU_OPERATIONS, HOROVOD_NCCL_HOME, …"""


def wheel_key(environment: PythonEnvironment, mpi: Mpi, gpu: Gpu, environ: Mapping[str, str]) -> str:
    """Return the cache folder's name for exactly this build of Horovod."""
    platform = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    tensorflow = environment.version(*TENSORFLOW_NAMES)
    nccl = f"-{gpu.identity}" if gpu.identity else ""
    if not nccl and any(_BUILD_SETTING.match(name) and value == "NCCL" for name, value in environ.items()):
        header = Path(environ.get("HOROVOD_NCCL_HOME") or "/usr", "include", "nccl.h")
        nccl = f"-nccl{short_hash(header.read_bytes() if header.exists() else b'')}"
    patches = short_hash(_lines([f"{name} {digest}" for name, digest in series_hashes().items()]))
    horovod = f"horovod{patched_version()}-{patches}"
    return f"{horovod}-tensorflow{tensorflow}-{platform}-{mpi.identity}{nccl}-{_toolchain(environ)}"


def _toolchain(environ: Mapping[str, str]) -> str:
    """Return a hash of compiler, C library, flags and build settings."""
    compiler = environ.get("CXX") or "g++"
    settings = [f"{name}={environ[name]}" for name in sorted(environ) if _BUILD_SETTING.match(name)]
    flags = [environ.get(name, "") for name in ("CC", "CXX", "CXXFLAGS", "LDFLAGS")]
    return short_hash(
        _lines(settings)
        + output_of([*compiler.split(), "--version"])
        + output_of(["getconf", "GNU_LIBC_VERSION"])
        + _lines(flags)
    )


def _lines(texts: list[str]) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def cache_folder(environment: PythonEnvironment, environ: Mapping[str, str]) -> Path:
    """Return the wheel cache: HVDTRAIN_WHEELS, else in the user's cache folder."""
    if chosen := environ.get("HVDTRAIN_WHEELS"):
        return Path(chosen)
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or environment.notes, ".cache")
    return Path(cache, "hvdtrain", "wheels")


def find_wheel(folder: Path) -> Path | None:
    """Return Horovod's wheel in `folder`, or None."""
    return next(folder.glob("horovod-*.whl"), None)


def keep_wheel(built: Path, folder: Path) -> Path:
    """Copy a wheel into the cache `folder` atomically; return it, or `built` if not writable."""
    part = folder / f".{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built, part)
        return part.rename(folder / built.name)
    except OSError as error:
        say(f"the wheel is not kept for other environments: {error}")
        return built
