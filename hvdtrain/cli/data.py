"""`data pack`: convert class folders of images to TFRecord shards."""

import argparse
from pathlib import Path

from rich.progress import Progress

from hvdtrain.cli.parser import Parser
from hvdtrain.cli.running import import_tensorflow_for_cpu, run_command, run_here

COMMANDS = {"pack": "hvdtrain.cli.data:pack_main"}
USAGE = """\
usage: python -m hvdtrain data COMMAND ...

Commands:
  pack SRC DEST        make TFRecord shards of a folder (or tar file) of class folders of images

"python -m hvdtrain data COMMAND --help" shows the options of a command."""


def main(argv: list[str]) -> int:
    """Run the subcommand in `argv` and return the exit code."""
    return run_command("data", argv, COMMANDS, USAGE)


def pack_main(argv: list[str]) -> int:
    """Pack images with a progress bar, and return the exit code."""
    parser = Parser(
        "data pack",
        "Makes TFRecord shards of images in class folders. The images go in as they are, in an order that "
        "mixes the classes. Train on the result with --data tfrecord --data-args path DEST.",
    )
    parser.add_argument("source", metavar="SRC", help="folder of class folders of JPEG or PNG files, or a tar of it")
    parser.add_argument("dest", metavar="DEST", type=Path, help="new or empty folder")
    parser.add_argument("--shards", type=int, default=0, metavar="N", help="training files (default: one per 128 MB)")
    parser.add_argument(
        "--validation", type=int, default=0, metavar="N", help="images to hold out in all, evenly by class"
    )
    return run_here(lambda: parser.parse_args(argv), _pack)


def _pack(words: argparse.Namespace) -> int:
    import_tensorflow_for_cpu()
    from hvdtrain.data.files import find_data
    from hvdtrain.data.pack import pack

    total = 0
    with Progress(transient=True) as bar:
        task = bar.add_task(f"packing into {words.dest}", total=None)
        for done, total in pack(find_data(words.source), words.dest, shards=words.shards, validation=words.validation):
            bar.update(task, completed=done, total=total)
    files = sorted(file.name for file in words.dest.glob("*.tfrecord"))
    print(
        f"{words.dest} holds {total:,} images in {len(files)} files.\n"
        f"Train on it with --data tfrecord --data-args path {words.dest}"
    )
    return 0
