"""What a build of Horovod for GPUs needs beside the build for CPUs: a compiler and NCCL."""

import os
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.installation.gpu import PYPI_COMPILER, Gpu
from hvdtrain.installation.pip import Pip


def gpu_settings(gpu: Gpu, work: Path, environ: Mapping[str, str], pip: Pip) -> dict[str, str]:
    """Return the environment variables of a build with NCCL; what they name is made in the folder `work`.

    Args:
        gpu: what to build with.
        work: folder of the build.
        environ: the environment variables of the build so far.
        pip: installs the compiler where the machine has none.
    """
    assert gpu.nccl is not None
    compiler = gpu.compiler or from_pypi(work / "cuda", pip)
    settings = {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": str(compiler),
        "HOROVOD_NCCL_HOME": str(_linked(gpu.nccl, work / "nccl")),
        "HOROVOD_NCCL_LINK": "SHARED",
        # Horovod's build asks the first nvcc on PATH what it knows.
        "PATH": os.pathsep.join([str(compiler / "bin"), environ["PATH"]]),
        # TensorFlow's NCCL, of whichever environment the wheel is installed in; else the one that was built with.
        "LDFLAGS": f"{environ['LDFLAGS']} -Wl,-rpath,\\$ORIGIN/../../nvidia/nccl/lib -Wl,-rpath,{gpu.nccl}/lib",
    }
    capabilities = {"HOROVOD_BUILD_CUDA_CC_LIST": ",".join(gpu.capabilities)} if gpu.capabilities else {}
    return settings | capabilities


def from_pypi(folder: Path, pip: Pip) -> Path:
    """Install NVIDIA's compiler into `folder` and return the toolkit in it."""
    pip.install_into(folder, PYPI_COMPILER, what="NVIDIA's compiler")
    toolkit = next(folder.glob("nvidia/cu*/bin/nvcc")).parent.parent
    # The compiler's own settings look for libraries in lib64, and CMake for the run time by this name.
    (toolkit / "lib64").symlink_to("lib")
    (toolkit / "lib" / "libcudart.so").symlink_to(next((toolkit / "lib").glob("libcudart.so.*")).name)
    return toolkit


def _linked(nccl: Path, folder: Path) -> Path:
    """Return a folder with NCCL's header, and its library by the name that a linker looks for."""
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(nccl / "include")
    library = next((nccl / "lib").glob("libnccl.so*"))
    (folder / "lib" / "libnccl.so").symlink_to(library)
    return folder
