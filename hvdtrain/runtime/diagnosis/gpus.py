"""Checks of the GPUs: driver, libraries, an all-reduce over all of them, and training in float16."""

import os
import re
import sys
from collections.abc import Iterator

from hvdtrain.runtime.diagnosis.machine import (
    Check,
    beside_python,
    failed,
    find_report,
    launch_environment,
    ok,
    run,
    warning,
    what_went_wrong,
)
from hvdtrain.runtime.diagnosis.probe import Finding
from hvdtrain.runtime.diagnosis.software import SETUP, TENSORFLOW
from hvdtrain.runtime.python_environment import activate

TIMEOUT = 300.0
"""Seconds for all GPUs to be tried; a first start on one compiles kernels."""
MODULE = "hvdtrain.runtime.gpucheck"


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


def check_training(gpus: int, *, timeout: float = TIMEOUT) -> Check:
    """Sum and train on every GPU, one rank for each."""
    name = f"{gpus} GPU{'s' if gpus > 1 else ''}, training"
    horovodrun = beside_python("horovodrun")
    if horovodrun is None:
        return failed(name, "horovodrun is not on PATH", f"{activate()}, or {SETUP}")
    command = [horovodrun, "-np", str(gpus), sys.executable, "-m", MODULE]
    environ = launch_environment(os.environ, gpus=True) | {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
    outcome = run(command, timeout=timeout, environ=environ)
    report = find_report(outcome.output)
    again = f"see all of it: NCCL_DEBUG=INFO horovodrun -np {gpus} python -m {MODULE}"
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
