"""What the benchmarks share: reading what a launch prints, and writing figures down."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

from hvdtrain.bench.launching import LaunchFailed, ask, launcher, shown

__all__ = ["FREEING", "launcher", "printed", "write"]

BLOCK_BYTES = 64 * 1024
"""Larger blocks of memory go back to the system at once."""
FREEING = ["env", "TF_ENABLE_ONEDNN_OPTS=0", f"MALLOC_MMAP_THRESHOLD_={BLOCK_BYTES}"]
"""Starts a command whose peak of memory is what it needs: oneDNN's allocator would keep what was freed for the next
step, and the C library would keep blocks of less than some megabytes."""


def printed(command: Sequence[str], word: str, *, limit_s: float) -> Any:
    """Run a command; return the JSON that it prints in a line behind `word`. A command that fails ends the program."""
    try:
        return ask(command, word, limit_s=limit_s).value
    except LaunchFailed as error:
        sys.exit(f"{shown(command)} failed: {error}")


def write(arguments: argparse.Namespace, results: Any) -> None:
    """Write figures to `--out`, if it was given, with the date, the machine and every other option."""
    if arguments.out is None:
        return
    settings = {key: value for key, value in vars(arguments).items() if key != "out" and value not in (None, False)}
    host = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    report = {"date": time.strftime("%Y-%m-%d"), "host": host, "settings": settings, "results": results}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
