"""The wheel of Horovod for this environment: taken from the cache, or built and kept there."""

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
"""Variables that change what is built: HOROVOD_GPU_OPERATIONS, HOROVOD_NCCL_HOME, and the like."""


def wheel_key(environment: PythonEnvironment, mpi: Mpi, gpu: Gpu, environ: Mapping[str, str]) -> str:
    """Return the name of the cache's folder for exactly this build of Horovod."""
    platform = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    tensorflow = environment.version(*TENSORFLOW_NAMES)
    nccl = f"-{gpu.identity}" if gpu.identity else _nccl_identity(environ)
    patches = short_hash(_lines([f"{name} {digest}" for name, digest in series_hashes().items()]))
    horovod = f"horovod{patched_version()}-{patches}"
    return f"{horovod}-tensorflow{tensorflow}-{platform}-{mpi.identity}{nccl}-{_toolchain(environ)}"


def _toolchain(environ: Mapping[str, str]) -> str:
    """Return a hash of the compiler, the C library, their settings and the user's settings of the build."""
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


def _nccl_identity(environ: Mapping[str, str]) -> str:
    """Return a part of the key that differs by NCCL's version, if Horovod is built with NCCL."""
    if not any(_BUILD_SETTING.match(name) and value == "NCCL" for name, value in environ.items()):
        return ""
    header = Path(environ.get("HOROVOD_NCCL_HOME") or "/usr", "include", "nccl.h")
    return f"-nccl{short_hash(header.read_bytes() if header.exists() else b'')}"


def cache_folder(environment: PythonEnvironment, environ: Mapping[str, str]) -> Path:
    """Return the folder that keeps built wheels: HVDTRAIN_WHEELS, else one in the user's cache."""
    if chosen := environ.get("HVDTRAIN_WHEELS"):
        return Path(chosen)
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or environment.notes, ".cache")
    return Path(cache, "hvdtrain", "wheels")


def find_wheel(folder: Path) -> Path | None:
    """Return the wheel of Horovod in `folder`, or None."""
    return next(folder.glob("horovod-*.whl"), None)


def keep_wheel(built: Path, folder: Path) -> Path:
    """Copy a wheel to `folder` of the cache and return where it now is; a cache that can't be written is no obstacle.

    Its name appears once it is complete: a killed setup leaves no broken wheel behind.
    """
    part = folder / f".{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built, part)
        return part.rename(folder / built.name)
    except OSError as error:
        say(f"the wheel is not kept for other environments: {error}")
        return built
