"""Build the wheel of a patched Horovod for an environment's TensorFlow, and cache it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from pprint import pformat

from hvdtrain.config.errors import SetupError
from hvdtrain.installation.gpu import PYPI_COMPILER, Gpu
from hvdtrain.installation.mpi import Mpi
from hvdtrain.installation.steps import Pip, Steps, output_of, say, short_hash
from hvdtrain.runtime.horovod_patches import HOROVOD, RECORD, patched_version, series, series_hashes
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


def gpu_settings(gpu: Gpu, work: Path, environ: Mapping[str, str], pip: Pip) -> dict[str, str]:
    """Return the environment variables of a build with NCCL; missing tools are placed in `work`."""
    assert gpu.nccl is not None
    compiler = gpu.compiler or from_pypi(work / "cuda", pip)
    linked = work / "nccl"  # the header, and the library by the name that is linked
    (linked / "lib").mkdir(parents=True)
    (linked / "include").symlink_to(gpu.nccl / "include")
    (linked / "lib" / "libnccl.so").symlink_to(next((gpu.nccl / "lib").glob("libnccl.so*")))
    settings = {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": str(compiler),
        "HOROVOD_NCCL_HOME": str(linked),
        "HOROVOD_NCCL_LINK": "SHARED",
        # Horovod's build queries the first nvcc on PATH.
        "PATH": os.pathsep.join([str(compiler / "bin"), environ["PATH"]]),
        # TensorFlow's NCCL, of whichever environment the wheel is installed in; else the one that was built with.
        "LDFLAGS": f"{environ['LDFLAGS']} -Wl,-rpath,\\$ORIGIN/../../nvidia/nccl/lib -Wl,-rpath,{gpu.nccl}/lib",
    }
    capabilities = {"HOROVOD_BUILD_CUDA_CC_LIST": ",".join(gpu.capabilities)} if gpu.capabilities else {}
    return settings | capabilities


def from_pypi(folder: Path, pip: Pip) -> Path:
    """Install NVIDIA's compiler into `folder` and return its toolkit."""
    pip.install_into(folder, PYPI_COMPILER, what="NVIDIA's compiler")
    toolkit = next(folder.glob("nvidia/cu*/bin/nvcc")).parent.parent
    # The compiler's own settings look for libraries in lib64, and CMake for the run time by this name.
    (toolkit / "lib64").symlink_to("lib")
    (toolkit / "lib" / "libcudart.so").symlink_to(next((toolkit / "lib").glob("libcudart.so.*")).name)
    return toolkit


SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""SHA-256 of horovod-0.28.1.tar.gz."""

_RECORD = '''\
"""The patches that were applied to these sources, in order, by the beginning of the SHA-256 of their diffs."""

PATCHES = {}
'''


def patched_sources(work: Path, environ: Mapping[str, str], pip: Pip) -> Path:
    """Download Horovod's sources, apply the patches, and return their folder.

    The tools in `environ` must be on PYTHONPATH. Raises SetupError if download, hash check or a patch fails.
    """
    archive = pip.fetch_sources("horovod", HOROVOD, sha256=SHA256, folder=work / "sdist", environ=environ)
    shutil.unpack_archive(archive, work)
    sources = work / f"horovod-{HOROVOD}"
    say(f"applying {len(series())} patches to Horovod {HOROVOD}")
    for patch in series():
        apply_patch(patch, sources)
    hashes = pformat(series_hashes(), sort_dicts=False)
    (sources / "horovod" / RECORD).write_text(_RECORD.format(hashes))
    return sources


def apply_patch(patch: Path, sources: Path) -> None:
    """Apply one patch without fuzz or offsets. Raises SetupError if it does not apply; names the patch."""
    words = ("-p1", "--batch", "--forward", "--fuzz=0", "--directory", str(sources), "--input", str(patch))
    done = subprocess.run(
        ("patch", *words),
        env=os.environ | {"LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0 or "(offset" in done.stdout:
        raise SetupError(f"The patch {patch.name} does not apply to {sources}:\n{done.stdout.rstrip()}")


BUILD_TOOLS = ("setuptools==69.5.1", "wheel")
"""Build requirements of Horovod's setup.py, which needs an old setuptools. The environment's own is not changed."""

CMAKE = "4.4.4"
"""PyPI release of CMake, used if PATH has none >= 3.17."""

COMPILER_MEMORY = 1_500_000
"""Kilobytes per compiler process for Horovod's largest files."""


def build_wheel(environment: PythonEnvironment, mpi: Mpi, gpu: Gpu, work: Path, steps: Steps, pip: Pip) -> Path:
    """Build Horovod in the folder `work` and return its wheel. Raises SetupError if the build failed."""
    tools, wheels = work / "build-tools", work / "wheel"
    pip.install_into(tools, BUILD_TOOLS, what="the tools that build Horovod")
    cmake = _cmake_folder(work, os.environ, pip)
    settings = build_environment(os.environ, mpi, work, cmake)
    if gpu.kind == "nccl":
        settings |= gpu_settings(gpu, work, settings, pip)
    settings["PYTHONPATH"] = str(tools)
    sources = patched_sources(work, settings, pip)
    jobs = build_jobs()
    words = ("--verbose", "--no-cache-dir", "--no-build-isolation", "--no-deps")
    steps.run(
        f"building Horovod {HOROVOD} for this TensorFlow (about 3 minutes of one core's time, on {jobs} cores)",
        pip.command("wheel", *words, "--wheel-dir", str(wheels), str(sources)),
        log="horovod.log",
        failure="Horovod's build failed",
        environ=settings,
    )
    built = find_wheel(wheels)
    if built is None:
        raise SetupError(f"pip built no wheel of Horovod (its output: {environment.notes}/log/horovod.log).")
    return built


def build_environment(environ: Mapping[str, str], mpi: Mpi, work: Path, cmake: Path | None) -> dict[str, str]:
    """Return the environment variables of the build."""
    path = os.pathsep.join(str(folder) for folder in (cmake, environ["PATH"]) if folder)
    # The first is meant for the run: in the build it would become the default of the wheel. The version has its end.
    left_out = ("HOROVOD_CPU_OPERATIONS", "HOROVOD_LOCAL_VERSION")
    kept = {name: value for name, value in environ.items() if name not in left_out}
    return kept | {
        "PATH": path,
        "TMPDIR": str(work),
        # The wheel must find PyPI's MPI in whichever environment it is installed, hence a path relative to itself.
        "LDFLAGS": f"{environ.get('LDFLAGS', '')} -Wl,-rpath,\\$ORIGIN/../../../..",
        "MAKEFLAGS": f"-j{build_jobs()}",
        "HOROVOD_WITHOUT_MPI" if mpi.kind == "none" else "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
    }


def _cmake_folder(work: Path, environ: Mapping[str, str], pip: Pip) -> Path | None:
    """Return a folder with a suitable CMake; None if the one on PATH will do."""
    version = re.search(rb"(\d+)\.(\d+)", output_of(["cmake", "--version"], PATH=environ["PATH"]))
    if version and (int(version[1]), int(version[2])) >= (3, 17):
        return None
    pip.install_into(work / "cmake", [f"cmake=={CMAKE}"], what=f"CMake {CMAKE}")
    return work / "cmake" / "cmake" / "data" / "bin"


def build_jobs() -> int:
    """Return the number of parallel compilers: the cores, limited by free memory."""
    free = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), flags=re.MULTILINE)
    fit = int(free[1]) // COMPILER_MEMORY if free else 1
    return max(1, min(len(os.sched_getaffinity(0)), fit))
