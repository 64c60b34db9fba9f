"""What the benchmarks share: starting a launch, reading what it prints, and writing figures down."""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def launcher(controller: str, size: int) -> list[str]:
    """Return the words before `python` that start `size` ranks; none for the controller `none`."""
    if controller == "none":
        return []
    if controller == "mpirun":
        return ["mpirun", "--bind-to", "none", "--oversubscribe", "-np", str(size)]
    return ["horovodrun", "--gloo", "-np", str(size)]


def printed(command: Sequence[str], word: str, *, limit_s: float) -> Any:
    """Run a command; return the JSON that it prints in a line behind `word`. A command that fails ends the program."""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if os.geteuid() == 0:
        environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit_s, check=False)
    found = re.search(rf"{word} ([{{\[].*)", done.stdout) if word else None
    if done.returncode or (word and found is None):
        sys.exit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(found[1]) if found else None


def write(arguments: argparse.Namespace, results: Any) -> None:
    """Write figures to `--out`, if it was given, with the date, the machine and every other option."""
    if arguments.out is None:
        return
    settings = {key: value for key, value in vars(arguments).items() if key != "out" and value not in (None, False)}
    host = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    report = {"date": time.strftime("%Y-%m-%d"), "host": host, "settings": settings, "results": results}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
