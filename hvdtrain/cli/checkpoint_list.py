"""`checkpoint list` and `checkpoint verify`."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.integrity import verify
from hvdtrain.checkpoint.manifest import saved_at, scalars_of
from hvdtrain.checkpoint.naming import checkpoints_at, damaged_ones, numbered
from hvdtrain.cli.local import run_here
from hvdtrain.config.errors import CheckpointError, on_command_line


def list_main(argv: list[str]) -> int:
    """Print a line for each checkpoint; return 2 for a mistake, else 0."""
    return run_here(lambda: _parser("list", "Show the checkpoints of a run or of a script.").parse_args(argv), _list)


def verify_main(argv: list[str]) -> int:
    """Print what is wrong with each checkpoint; return 1 if one is damaged, 2 for a mistake, else 0."""
    told = "Read every byte of the checkpoints, and compare it with its SHA-256. The exit code is 1 if one is damaged."
    return run_here(lambda: _parser("verify", told).parse_args(argv), _verify)


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"python -m hvdtrain checkpoint {command}", description=description)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a run, a folder of checkpoints, or one checkpoint")
    return parser


def _list(arguments: argparse.Namespace) -> int:
    found = _checkpoints(arguments.folder)
    print("\n".join(table([["step", "epoch", "saved", "size", ""], *map(_row, found)])))
    for path in damaged_ones(found[0].parent):
        print(f"{path.name} was damaged, and set aside")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    found, damaged = _checkpoints(arguments.folder), 0
    for path in found:
        try:
            verify(path)
            print(f"{path.name}  good", flush=True)
        except CheckpointError as error:
            damaged += 1
            print(f"{path.name}  {on_command_line(error.message)}", flush=True)
    print(f"{len(found) - damaged} of {len(found)} checkpoints are good")
    return 1 if damaged else 0


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that are meant by `folder`, the newest last.

    Raises:
        CheckpointError: there are none.
    """
    place = checkpoints_at(folder)
    found = numbered(place) or ([place] if (place / "manifest.json").is_file() else [])
    if not found:
        raise CheckpointError(
            f"There is no checkpoint in {folder}. Name the folder of a run, a folder of checkpoints, or one of them."
        )
    return found


def _row(path: Path) -> list[str]:
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    try:
        scalars, saved = scalars_of(path), saved_at(path)
    except CheckpointError as error:
        return [path.name.removeprefix("step-").lstrip("0"), "", "", _bytes(size), on_command_line(error.message)]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved))
    return [str(scalars.get("step", "")), str(scalars.get("epoch", "")), when, _bytes(size), _remark(scalars)]


def _remark(scalars: dict[str, Any]) -> str:
    best = scalars.get("best") or {}
    if not best or best.get("step") != scalars.get("step"):
        return ""
    return f"best so far: {best['metric']} {best['value']:.4f}"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return `rows` as lines whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
