"""`data pack`: convert class folders of images to TFRecord shards."""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hvdtrain.cli.local import import_tensorflow_for_cpu, run_here
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.terminal import on_terminal

if TYPE_CHECKING:
    from hvdtrain.data.files.packed_folder import PackedFolder
    from hvdtrain.data.packing.pack import PackProgress

Show = Callable[["PackProgress"], None]
SECONDS_BETWEEN_LINES = 10.0

_DESCRIPTION = """\
Makes TFRecord shards of images in class folders, several processes at a time. The images go in as they are, in an
order that mixes the classes. Interrupted, it goes on from there when it is called again in the same way. Train on
the result with --data tfrecord --data-args path DEST.
"""


def main(argv: list[str]) -> int:
    """Pack images with a progress display, and return the exit code."""
    return run_here(lambda: _parser().parse_args(argv), _pack)


def _pack(arguments: argparse.Namespace) -> int:
    import_tensorflow_for_cpu()
    from hvdtrain.data.files.locations import find_data
    from hvdtrain.data.packing.pack import pack

    options = {name: getattr(arguments, name) for name in ("shards", "shard_mb", "workers", "validation")}
    options = {name: value for name, value in options.items() if value is not None}
    with _display(arguments.dest) as show:
        packed = pack(find_data(arguments.source), arguments.dest, progress=show, **options)
    print(_summary(packed))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m hvdtrain data pack", description=_DESCRIPTION)
    parser.add_argument("source", metavar="SRC", help="folder of class folders of JPEG or PNG files, or a tar of it")
    parser.add_argument("dest", metavar="DEST", type=Path, help="new or empty folder, or one that was begun so")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--shards", type=int, metavar="N", help="number of files for the training images")
    size.add_argument("--shard-mb", type=int, metavar="MB", help="megabytes of images in a file (default 128)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: the cores, up to 16)")
    parser.add_argument("--validation", type=int, metavar="N", help="images to hold out, each class's share of them")
    return parser


@contextlib.contextmanager
def _display(dest: Path) -> Iterator[Show]:
    """Yield the progress callback: a bar on a terminal, else occasional lines."""
    if not on_terminal(detect_environment()):
        yield _Lines().show
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(f"packing into {dest}", total=None)
        yield lambda progress: bar.update(task, completed=progress.bytes, total=progress.all_bytes)


class _Lines:
    """Prints the progress at each tenth, and every ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = self._said = clock()
        self._tenths = 0

    def show(self, progress: "PackProgress") -> None:
        """Print a line if one is due."""
        now, share = self._clock(), progress.share
        if int(share * 10) == self._tenths and now - self._said < SECONDS_BETWEEN_LINES:
            return
        self._tenths, self._said = int(share * 10), now
        speed = progress.bytes / 1e6 / max(now - self._begin, 1e-3)
        print(f"packed {share:4.0%}  {progress.shards} of {progress.all_shards} files  {speed:.0f} MB/s", flush=True)


def _summary(packed: "PackedFolder") -> str:
    size = sum(shard.bytes for shard in packed.shards)
    parts = [f"{sum(counts.values()):,} for {split}" for split, counts in packed.counts().items()]
    return (
        f"{packed.path} holds {len(packed.labels):,} images of {len(packed.classes)} classes ({', '.join(parts)}) in "
        f"{len(packed.shards)} files, {size / 1e6:,.1f} MB.\n"
        f"Train on it with --data tfrecord --data-args path {packed.path}"
    )
