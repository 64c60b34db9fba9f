"""Checks of the libraries: versions, and whether they fit together."""

import contextlib
import re
import sys
from collections.abc import Sequence

from hvdtrain.compat import KERAS_REQUIREMENT, untested_keras
from hvdtrain.runtime.diagnosis.machine import Check, failed, ok, run, warning
from hvdtrain.runtime.diagnosis.probe import Finding
from hvdtrain.runtime.horovod_patches import difference
from hvdtrain.runtime.python_environment import activate

SETUP = "python -m hvdtrain setup"
"""Builds Horovod into the active environment."""
TENSORFLOW = "2.21"
"""Release of TensorFlow that hvdtrain is made for."""

_MAKERS = {"Open MPI": "Open MPI", "MPICH": "(?:MPICH Version|HYDRA build details)", "Intel MPI": "Intel"}
"""What comes before the version where an MPI's library or its mpirun introduces itself."""


def check_python(version: Sequence[int] = sys.version_info[:3]) -> Check:
    """Check that this Python is one that TensorFlow and hvdtrain run on."""
    text = ".".join(map(str, version))
    if not (3, 11) <= tuple(version[:2]) <= (3, 13):
        return failed(
            "Python", f"{text}; 3.11 to 3.13 are supported", "make the environment with Python 3.11, 3.12 or 3.13"
        )
    untested = "" if version[1] == 11 else "; hvdtrain is tested on 3.11 only"
    return ok("Python", text + untested)


def check_tensorflow(found: Finding) -> Check:
    """Check that TensorFlow imports, and that it is the right release."""
    name, fix = "TensorFlow", f"pip install 'tensorflow~={TENSORFLOW}.0'"
    if found.get("missing"):
        return failed(name, "not installed", fix)
    if "error" in found:
        return failed(name, found["error"], fix)
    if _release(found["version"]) != TENSORFLOW:
        return failed(name, f"{found['version']}; hvdtrain is made for {TENSORFLOW}", fix)
    return ok(name, found["version"])


def check_keras(found: Finding) -> Check:
    """Check that Keras imports, that it is Keras 3 and computes with TensorFlow."""
    fix = f"pip install '{KERAS_REQUIREMENT}'"
    backend_fix = 'unset KERAS_BACKEND, and set "backend": "tensorflow" in ~/.keras/keras.json if it is there'
    if found.get("missing"):
        return failed("Keras", "not installed", fix)
    if "error" in found:
        return failed("Keras", found["error"], f"{fix}; {backend_fix}")
    if not found["version"].startswith("3."):
        return failed("Keras", f"{found['version']}; hvdtrain needs Keras 3", fix)
    if found["backend"] != "tensorflow":
        return failed("Keras", f"{found['version']} on the {found['backend']} backend", backend_fix)
    if untested_keras(found["version"]):
        return warning("Keras", f"{found['version']} on TensorFlow; hvdtrain is not tested with it", fix)
    return ok("Keras", f"{found['version']} on TensorFlow")


def check_horovod(found: Finding, tensorflow: Finding) -> Check:
    """Check that Horovod's library loads into this TensorFlow, and that it was compiled for it.

    Without Horovod one process trains all the same, so its absence is a warning.
    """
    if found.get("missing"):
        return warning("Horovod", "not installed: training runs on one process only", SETUP)
    if "error" in found:
        return failed("Horovod", found["error"], f"{SETUP} (builds it against the installed TensorFlow)")
    built_for, version = found["built_for"], tensorflow.get("version", "")
    what = f"{found['version']}, built for TensorFlow {built_for or '(not recorded)'}"
    if built_for and _release(built_for) != _release(version):
        return failed("Horovod", f"{what}, but {version} is installed", SETUP)
    if built_for and built_for != version:
        return warning("Horovod", f"{what}; {version} is installed", SETUP)
    if how := difference(found["patches"]):
        return warning("Horovod", f"{what}; of hvdtrain's patches (docs/horovod.md) it {how}", SETUP)
    return ok("Horovod", f"{what}, and loads into it")


def check_controllers(found: Finding) -> Check:
    """Check which ways of exchange were built into Horovod."""
    built = [name for name, there in (("Gloo", found["gloo"]), ("MPI", found["mpi"])) if there]
    if not built:
        return failed("Controllers", "Horovod was built with neither Gloo nor MPI", SETUP)
    absent = "" if len(built) == 2 else "; MPI is not built" if built == ["Gloo"] else "; Gloo is not built"
    return ok("Controllers", " and ".join(built) + absent)


def check_mpi(horovod: Finding, mpi4py: Finding) -> Check:
    """Check that mpirun, and mpi4py for the control channel, belong to one MPI library."""
    if not horovod["mpi"]:
        return ok("MPI", "not used: this Horovod speaks Gloo")
    outcome = None
    with contextlib.suppress(OSError):
        outcome = run(["mpirun", "--version"], timeout=20.0)
    if outcome is None or outcome.returncode != 0:
        return failed(
            "MPI",
            "mpirun is not on PATH or does not start, but Horovod is built with MPI",
            f"{activate()}, or load the MPI module that Horovod was built with; or: horovodrun --gloo",
        )
    if "library" not in mpi4py:
        detail = "mpi4py is not installed" if mpi4py.get("missing") else f"mpi4py: {mpi4py.get('error')}"
        return failed("MPI", detail, "pip install 'mpi4py>=4'")
    ours, theirs = mpi_identity(mpi4py["library"]), mpi_identity(outcome.output)
    what = f"mpirun of {theirs or 'unknown make'}, mpi4py on {ours or 'unknown make'}"
    if ours and theirs and ours != theirs:
        return failed("MPI", what, f"{activate()}, so that the mpirun of {ours} comes first on PATH")
    return ok("MPI", f"{ours} (mpirun and mpi4py)" if ours and ours == theirs else what)


def mpi_identity(text: str) -> str | None:
    """Return maker and version, such as ``Open MPI 4.1.8``, from what an MPI says of itself; None if unclear."""
    for maker, lead in _MAKERS.items():
        if match := re.search(rf"{lead}\D*(\d+\.\d+(?:\.\d+)?)", text):
            return f"{maker} {match[1]}"
    return None


def _release(version: str) -> str:
    """Return ``2.21`` of ``2.21.0``."""
    return ".".join(version.split(".")[:2])
