"""`doctor`: check the installation for distributed training, and a script for Horovod compatibility."""

import argparse
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdtrain.runtime.diagnosis.diagnose import diagnose
from hvdtrain.runtime.diagnosis.machine import Check

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
    parser = argparse.ArgumentParser(prog="python -m hvdtrain doctor", description=_DESCRIPTION)
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
            parser.error(f"--script needs {error.name}, which is not installed: pip install hvdtrain[migrate]")
        return read_scripts(options.script, write_changes=options.write, show_all=options.all)
    for option in ("write", "all"):
        if getattr(options, option):
            parser.error(f"--{option} is about scripts: name them with --script PATH.")
    checks = _on_terminal() if sys.stdout.isatty() else _in_plain_text()
    return 1 if any(check.status == "failed" for check in checks) else 0


def _in_plain_text() -> list[Check]:
    """Print each check as soon as it finishes."""
    checks = []
    for check in diagnose():
        checks.append(check)
        print("\n".join(plain_lines(check)), flush=True)
    print(verdict(checks))
    return checks


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


def _on_terminal() -> list[Check]:
    """Show the running check, then the table."""
    console = Console(highlight=False)
    with console.status("checking") as status:
        checks = list(diagnose(lambda what: status.update(f"{what} ...")))
    console.print(table(checks))
    console.print(verdict(checks))
    return checks


def table(checks: Iterable[Check]) -> Table:
    """Format all checks as a table, each with its fix below."""
    grid = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for check in checks:
        found = Text(check.detail)
        if check.fix:
            found.append(f"\nfix: {check.fix}", style="bold")
        grid.add_row(Text(check.status, style=_STYLES[check.status]), Text(check.name), found)
    return grid


def verdict(checks: Iterable[Check]) -> str:
    """Summarize the outcome in a line."""
    counts = Counter(check.status for check in checks)
    words = [f"{counts['failed']} failed", f"{counts['warning']} to look at", f"{counts['ok']} ok"]
    return ", ".join(word for word in words if not word.startswith("0 "))
