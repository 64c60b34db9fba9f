"""Builds the wheel of a patched Horovod for the TensorFlow of an environment."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.config.errors import SetupError
from hvdtrain.installation.build_gpu import gpu_settings
from hvdtrain.installation.fingerprint import output_of
from hvdtrain.installation.gpu import Gpu
from hvdtrain.installation.mpi import Mpi
from hvdtrain.installation.pip import Pip
from hvdtrain.installation.sources import patched_sources
from hvdtrain.installation.steps import Steps
from hvdtrain.installation.wheel import find_wheel
from hvdtrain.runtime.horovod_patches import HOROVOD
from hvdtrain.runtime.python_environment import PythonEnvironment

BUILD_TOOLS = ("setuptools==69.5.1", "wheel")
"""What Horovod's setup.py needs; it is of the age of this setuptools. The environment's own stays as it is."""

CMAKE = "4.4.4"
"""Release of PyPI's CMake that is used where PATH has none of 3.17 or newer."""

COMPILER_MEMORY = 1_500_000
"""Kilobytes that some of Horovod's files take to compile."""


def build_wheel(environment: PythonEnvironment, mpi: Mpi, gpu: Gpu, work: Path, steps: Steps, pip: Pip) -> Path:
    """Build Horovod in the folder `work` and return its wheel.

    Raises:
        SetupError: the build failed.
    """
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
    """Return a folder with a CMake that can build Horovod; None where the one on PATH can."""
    version = re.search(rb"(\d+)\.(\d+)", output_of(["cmake", "--version"], PATH=environ["PATH"]))
    if version and (int(version[1]), int(version[2])) >= (3, 17):
        return None
    pip.install_into(work / "cmake", [f"cmake=={CMAKE}"], what=f"CMake {CMAKE}")
    return work / "cmake" / "cmake" / "data" / "bin"


def build_jobs() -> int:
    """Return how many compilers run at once: as many as cores, but only what fits into the free memory."""
    free = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), flags=re.MULTILINE)
    fit = int(free[1]) // COMPILER_MEMORY if free else 1
    return max(1, min(len(os.sched_getaffinity(0)), fit))
