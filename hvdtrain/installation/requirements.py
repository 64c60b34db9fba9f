"""What must be there before Horovod is built: an environment to install into, TensorFlow, compilers, disk space."""

import os
import re
import shutil
from collections.abc import Mapping

from packaging.requirements import Requirement

from hvdtrain.config.errors import SetupError
from hvdtrain.installation.steps import install_with
from hvdtrain.installation.wheel import TENSORFLOW_NAMES
from hvdtrain.runtime.diagnosis.software import TENSORFLOW
from hvdtrain.runtime.python_environment import PythonEnvironment

BUILD_MEGABYTES = 500
"""Free space for a build; measured: 75 MB at the peak, without Open MPI. With NCCL: estimated."""

EXTRA = "horovod"
"""The extra of hvdtrain that lists what Horovod needs at run time."""

_OWN = "python3 -m venv --system-site-packages ~/hvdtrain && source ~/hvdtrain/bin/activate && pip install hvdtrain"


def check_environment(environment: PythonEnvironment) -> None:
    """Refuse an environment that Horovod can't be installed into or built for.

    Raises:
        SetupError: says what to do.
    """
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
    """Refuse an environment without the TensorFlow that hvdtrain is made for.

    Raises:
        SetupError: says how to get it.
    """
    version = environment.version(*TENSORFLOW_NAMES)
    if version is None or not version.startswith(f"{TENSORFLOW}."):
        raise SetupError(
            f"TensorFlow {TENSORFLOW} must be installed before Horovod is built for it. Received: {version or 'none'} "
            f"in {environment.prefix}. Run: pip install 'tensorflow~={TENSORFLOW}.0'"
        )


def check_build_tools(environ: Mapping[str, str]) -> None:
    """Refuse to build without a C++ compiler, make and patch.

    Raises:
        SetupError: names the missing one and how to get it.
    """
    compiler = (environ.get("CXX") or "g++").split()[0]
    for tool in (compiler, "make", "patch"):
        if shutil.which(tool, path=environ["PATH"]) is None:
            raise SetupError(
                f"{tool} is missing, and Horovod is compiled: {install_with('g++ make patch', 'gcc-c++ make patch')}. "
                "On a cluster, load its compiler module; without root, conda install -c conda-forge gxx make patch."
            )


def check_disk(environment: PythonEnvironment) -> None:
    """Refuse to build where the disk is too full.

    Raises:
        SetupError: says how much there is and how much is needed.
    """
    free = shutil.disk_usage(environment.prefix).free >> 20
    if free < BUILD_MEGABYTES:
        raise SetupError(
            f"Building Horovod needs {BUILD_MEGABYTES} MB of free disk space. Received: {free} MB in "
            f"{environment.prefix}. Free some, or make the environment on a larger disk."
        )


def needed_packages(environment: PythonEnvironment) -> list[Requirement]:
    """Return what Horovod needs at run time: the requirements of hvdtrain's extra.

    Raises:
        SetupError: hvdtrain is run from a clone, but not installed.
    """
    hvdtrain = environment.distribution("hvdtrain")
    if hvdtrain is None:
        raise SetupError(
            f"hvdtrain must be installed in the environment. Received: none in {environment.prefix}. Run: pip install "
            "hvdtrain (in a clone: pip install -e .)"
        )
    declared = map(Requirement, hvdtrain.requires or [])
    return [Requirement(f"{need.name}{need.specifier}") for need in declared if _only_with_extra(need)]


def _only_with_extra(need: Requirement) -> bool:
    marker = need.marker
    return marker is not None and marker.evaluate({"extra": EXTRA}) and not marker.evaluate({"extra": ""})


def is_met(need: Requirement, environment: PythonEnvironment) -> bool:
    """Return whether `environment` has a version that fits."""
    version = environment.version(need.name)
    return version is not None and need.specifier.contains(version, prereleases=True)
