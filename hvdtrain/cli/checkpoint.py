"""`checkpoint`: list, verify and export the checkpoints of a run or of a script."""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from hvdtrain.checkpoint import index
from hvdtrain.checkpoint.naming import checkpoints_at, numbered
from hvdtrain.checkpoint.selection import damaged_ones
from hvdtrain.checkpoint.tensor_files import SliceReader
from hvdtrain.cli.parser import Parser, shows_help
from hvdtrain.cli.running import run_alone, run_command, run_here
from hvdtrain.config.errors import CheckpointError, on_command_line
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.session import Session

COMMANDS = {
    "list": "hvdtrain.cli.checkpoint:list_main",
    "verify": "hvdtrain.cli.checkpoint:verify_main",
    "export": "hvdtrain.cli.checkpoint:export_main",
}

USAGE = """\
usage: python -m hvdtrain checkpoint COMMAND DIR ...

Commands:
  list DIR             show the checkpoints: step, epoch, time, size, and which is the best
  verify DIR           read every byte of them, and compare it with its SHA-256
  export DIR           write the model of one as a file that Keras or NumPy loads

DIR is the folder of a run, a folder of checkpoints, or a single checkpoint.
"python -m hvdtrain checkpoint COMMAND --help" shows the options of a command."""

_EXPORT_EPILOG = """\
The end of FILE's name says what is written:
  .keras         the model, for keras.models.load_model
  .weights.h5    its weights, for model.load_weights
  .npz           its weights as arrays by their place in the model, for numpy.load

Of a run everything is known. Of a script's checkpoints, weights can be written as .npz; for the others
--model names the function of the script that builds the model.
"""


def main(argv: list[str]) -> int:
    """Run the subcommand in `argv` and return the exit code: 1 for a damaged checkpoint, 2 for a mistake."""
    return run_command("checkpoint", argv, COMMANDS, USAGE)


def _parser(command: str, description: str, **more: Any) -> Parser:
    parser = Parser(f"checkpoint {command}", description, **more)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a run, a folder of checkpoints, or one checkpoint")
    return parser


# -- list and verify --


def list_main(argv: list[str]) -> int:
    """Print a line for each checkpoint; return 2 for a mistake, else 0."""
    return run_here(lambda: _parser("list", "Show the checkpoints of a run or of a script.").parse_args(argv), _list)


def verify_main(argv: list[str]) -> int:
    """Print the state of each checkpoint; return 1 if one is damaged, 2 for a mistake, else 0."""
    text = "Read every byte of the checkpoints, and compare it with its SHA-256. The exit code is 1 if one is damaged."
    return run_here(lambda: _parser("verify", text).parse_args(argv), _verify)


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
            SliceReader(path).verify()
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
    found = numbered(place) or ([place] if (place / index.NAME).is_file() else [])
    if not found:
        raise CheckpointError(
            f"There is no checkpoint in {folder}. Name the folder of a run, a folder of checkpoints, or one of them."
        )
    return found


def _row(path: Path) -> list[str]:
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    try:
        found = index.read_index(path)
    except CheckpointError as error:
        return [path.name.removeprefix("step-").lstrip("0"), "", "", decimal(size), on_command_line(error.message)]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.saved_at))
    step, best = found.scalars.get("step", ""), found.scalars.get("best") or {}
    remark = f"best so far: {best['metric']} {best['value']:.4f}" if best and best.get("step") == step else ""
    return [str(step), _epoch(found.scalars), when, decimal(size), remark]


def _epoch(scalars: Mapping[str, Any]) -> str:
    """Return the epoch of the last step, counted as in the log."""
    if "epoch" not in scalars:
        return ""
    return str(scalars["epoch"] - scalars.get("epochs_before", 0) + (scalars.get("step_in_epoch", 0) > 0))


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return `rows` as lines whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# -- export --


def export_main(argv: list[str]) -> int:
    """Export a checkpoint and return the exit code."""
    if shows_help(_export_parser(), argv):
        return 0
    runtime = RuntimeConfig(backend="single")
    return run_alone("checkpoint export", lambda files: _export_parser().parse_args(argv), _export, runtime=runtime)


def _export_parser() -> Parser:
    text = "Write the model of a checkpoint as a file that Keras or NumPy loads."
    parser = _parser("export", text, epilog=_EXPORT_EPILOG)
    add = parser.add_argument
    add("--to", type=Path, metavar="FILE", help="a new file (default: step-N.keras in DIR, or step-N.npz)")
    add("--checkpoint", default="newest", metavar="WHICH", help="newest (default), best, or the number of a step")
    add("--model", metavar="MODULE:FUNCTION", help="builds the model of a script's checkpoints")
    return parser


def _export(session: Session, arguments: argparse.Namespace) -> None:
    from hvdtrain.runs.export import export

    exported = export(
        session, folder=arguments.folder, which=arguments.checkpoint, file=arguments.to, builder=arguments.model
    )
    print(exported.file)
    if exported.layers:
        print(f"Before keras.models.load_model: from hvdtrain import {', '.join(exported.layers)}")
