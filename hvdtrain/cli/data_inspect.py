"""`data inspect`: show the contents of data, and damage."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.progress import Progress

from hvdtrain.cli.local import import_tensorflow_for_cpu, run_here
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.terminal import on_terminal

if TYPE_CHECKING:
    from hvdtrain.data.packing.inspection_report import Report, Tick

MOST_DAMAGED = 20
MOST_CLASSES = 20
"""With more classes, only the largest and smallest are shown."""

_DESCRIPTION = """\
Reads everything, decodes images, and shows counts, types, shapes and classes. PATH is a folder that data pack made,
TFRecord files (a file, a folder or a pattern in quotes), class folders of images or a tar file of them, MNIST's or
CIFAR's files, an .npz file or a folder of .npy files, a .csv or .tsv table, a text file or a folder of .txt files. The
exit code is 1 if something is damaged; what it is, is named.
"""


def main(argv: list[str]) -> int:
    """Print the contents of data; return 1 if something is damaged, 2 for a mistake, else 0."""
    return run_here(lambda: _parser().parse_args(argv), _inspect)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m hvdtrain data inspect", description=_DESCRIPTION)
    parser.add_argument("path", metavar="PATH", help="file, folder or pattern; HVDTRAIN_DATA is searched too")
    return parser


def _inspect(arguments: argparse.Namespace) -> int:
    import_tensorflow_for_cpu()
    from hvdtrain.data.packing.inspection import inspect

    with _display() as tick:
        report = inspect(arguments.path, tick)
    print("\n".join(lines(report)))
    return 1 if report.damaged else 0


@contextlib.contextmanager
def _display() -> "Iterator[Tick | None]":
    if not on_terminal(detect_environment()):
        yield None
        return
    with Progress(transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def lines(report: "Report") -> list[str]:
    """Format a report as lines of text."""
    facts = {"kind": report.kind, **report.facts}
    width = max(map(len, [*facts, "damaged"]))
    said = [report.path, *(f"  {name:<{width}}  {value}" for name, value in facts.items())]
    said += [f"  {line}" for line in _balance(report)]
    said.append(f"  {'damaged':<{width}}  {len(report.damaged):,}" if report.damaged else "  nothing is damaged")
    said += [f"    {line}" for line in report.damaged[:MOST_DAMAGED]]
    more = len(report.damaged) - MOST_DAMAGED
    return [*said, f"    … and {more:,} more"] if more > 0 else said


def _balance(report: "Report") -> list[str]:
    """Return the table of classes, with a column per split."""
    if not report.balance:
        return []
    splits = list(dict.fromkeys(split for counts in report.balance.values() for split in counts))
    rows = [
        [label, *(f"{report.balance[label][split]:,}" for split in splits)]
        for label in sorted(report.balance, key=_place)
    ]
    if len(rows) > MOST_CLASSES:
        order = sorted(report.balance, key=lambda label: -report.balance[label].total())
        shown = {*order[: MOST_CLASSES // 2], *order[-MOST_CLASSES // 2 :]}
        rows = [row for row in rows if row[0] in shown]
        rows.append([f"… {len(order) - len(rows):,} more", *("" for _ in splits)])
    table = [["class", *splits], *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [_row(row, widths) for row in table]


def _row(cells: list[str], widths: list[int]) -> str:
    numbers = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *numbers]).rstrip()


def _place(label: str) -> tuple[bool, int, str]:
    """Sort key of a label: its number, else its name."""
    return not label.isdigit(), int(label) if label.isdigit() else 0, label
