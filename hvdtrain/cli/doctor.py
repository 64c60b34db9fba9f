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

from hvdtrain.cli.script.report import lines_of, needs_hand, read_script
from hvdtrain.cli.script.rewrite import difference, rewritten
from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.runtime.diagnosis.check import Check
from hvdtrain.runtime.diagnosis.diagnose import diagnose

WIDTH = 80
"""Width of plain text."""

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}

_DESCRIPTION = """\
Tries each part that training needs: Python, TensorFlow, Keras, Horovod and its fit with TensorFlow, MPI, an
all-reduce over 2 ranks with Gloo and with MPI, cores, memory, shared memory, GPUs. Takes about 20 seconds.
The exit code is 1 if a check failed. A warning is something that training can do without: where Horovod is
not installed, training runs on one process.

With --script a Horovod script is read instead, not run: each of its imports and calls works as it is, works with the
import changed to hvdtrain.horovod, or needs a change that is named. The exit code is 1 if one is to be made by hand.
"""


def main(argv: list[str]) -> int:
    """Run and show all checks; return 1 if one failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m hvdtrain doctor", description=_DESCRIPTION)
    parser.add_argument("--script", type=Path, metavar="FILE", help="say what a Horovod script calls, and what changes")
    parser.add_argument("--write", action="store_true", help="show and make the changes of the script's imports")
    options = parser.parse_args(argv)
    if options.write and options.script is None:
        parser.error("--write changes a script: name it with --script FILE.")
    if options.script is not None:
        return _read_script(options.script, write=options.write)
    checks = _on_terminal() if sys.stdout.isatty() else _in_plain_text()
    return 1 if any(check.status == "failed" for check in checks) else 0


def _read_script(path: Path, *, write: bool) -> int:
    """Report on a Horovod script, and rewrite its imports if `write`; return 1 if manual changes remain."""
    try:
        script = read_script(path)
        print("\n".join(lines_of(script)))
        if write and script.replacements:
            after = rewritten(script.source, script.replacements)
            print(difference(path, script.source, after), end="")
            path.write_bytes(after)
    except (UserError, OSError) as error:
        said = on_command_line(error.message) if isinstance(error, UserError) else error
        print(f"hvdtrain: error: {said}", file=sys.stderr)
        return 2
    return 1 if needs_hand(script) else 0


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
