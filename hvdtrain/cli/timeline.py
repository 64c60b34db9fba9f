"""`timeline`: finish the trace of a job that died before it could."""

import argparse
from pathlib import Path

from hvdtrain.cli.local import run_here
from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.tracing.merge import merge_parts, parts_folder


def main(argv: list[str]) -> int:
    """Merge what the ranks have left; return 0, or 2 for a mistake."""
    return run_here(lambda: _parser().parse_args(argv), _merge)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m hvdtrain timeline",
        description="Write the trace of a job that died, from what its ranks have left in FILE.parts. A job that ends "
        "in order writes it itself.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the file that was given as --timeline")
    return parser


def _merge(arguments: argparse.Namespace) -> int:
    file: Path = arguments.file
    folder = parts_folder(file)
    if not folder.is_dir():
        done = " It is written already." if file.is_file() else ""
        raise ConfigError(f"timeline {file}: no rank has left anything in {folder}.{done}")
    try:
        merged = merge_parts(file)
    except OSError as error:
        raise ConfigError(f"timeline {file}: it cannot be written: {error.strerror}.") from error
    for rank, overlap in merged.overlaps.items():
        print(f"{rank}: {overlap}")
    print(f"{file}: what {merged.ranks} rank(s) recorded. Open it at https://ui.perfetto.dev")
    return 0
