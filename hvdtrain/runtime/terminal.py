"""Whether what a rank prints reaches a terminal, or only looks as if it did."""

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from hvdtrain.runtime.launchers import Environment

TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")


def on_terminal(environment: Environment, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether standard output is a terminal on which lines can be redrawn.

    Open MPI gives each rank a terminal of its own and passes on what is written to it, wherever its own output
    goes and with a tag before each line if it was told so: there, the launcher's output decides.
    """
    if sys.stdout is None or not sys.stdout.isatty() or environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    if environment.launcher == "none":
        return True
    if environ.get("OMPI_MCA_orte_tag_output", "0") not in ("0", "false"):
        return False
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(TERMINALS)
    except OSError:
        return False


def say(text: str, stream: TextIO | None = None) -> None:
    """Write to standard error in one piece, so that the launcher does not mix it with other ranks' lines."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads any more
        out = stream or sys.stderr
        out.write(text + "\n")
        out.flush()


def drop_unreadable_output() -> None:
    """Drop what is written from now on to a standard stream whose reader is gone, or whose disk is full."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _drop(stream)
        except (ValueError, AttributeError):  # a closed stream, or none
            continue


def _drop(stream: TextIO) -> None:
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
