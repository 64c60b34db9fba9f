"""The logger `hvdtrain`, through which every message goes: its console, and a file for each rank.

Progress of a training is logged to `hvdtrain.progress` and shown on standard output; all else is shown on standard
error. Scripts add handlers of their own, or remove ours, as with any logger.
"""

import contextlib
import logging
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from logging.handlers import QueueHandler
from pathlib import Path
from typing import TextIO

from hvdtrain.runtime.launchers import Environment, detect_environment


def warn_on_first(text: str, *, stacklevel: int = 1) -> None:
    """Warn on the first rank alone, which says it for all.

    Args:
        text: what is said.
        stacklevel: how far above the caller the line is that the warning names; 1: where this is called.
    """
    if detect_environment().rank == 0:
        warnings.warn(text, stacklevel=stacklevel + 1)


LOGGER = logging.getLogger("hvdtrain")
PROGRESS = LOGGER.getChild("progress")

VERBATIM = "verbatim"
"""Attribute of a record whose message is shown without a prefix: it has one, or is a traceback."""
DRAWN = "drawn"
"""Attribute of a record that a live display shows already."""
TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
_PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "error: "}


class RankFilter(logging.Filter):
    """Add the rank to each record, and drop information from ranks other than 0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self._rank
        return self._rank == 0 or record.levelno > logging.INFO or hasattr(record, VERBATIM)


class ConsoleHandler(logging.Handler):
    """Write records to the standard streams of the moment, each in one piece.

    A launcher would mix what is written piecewise with other ranks' lines. An unreadable standard error loses messages
    silently; an unreadable standard output is an error for the observer that reports progress to it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == PROGRESS.name:
            if not hasattr(record, DRAWN) and sys.stdout is not None:
                _write(sys.stdout, record.getMessage())
            return
        prefix = "" if hasattr(record, VERBATIM) else "hvdtrain: " + _PREFIXES.get(record.levelno, "")
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads any more
            _write(sys.stderr, prefix + record.getMessage())


def set_up_logging(rank: int = 0) -> None:
    """Show the messages of this process on its console; a later call changes the rank.

    Messages are not passed on to the root logger, whose handlers would show them a second time;
    `logging.getLogger("hvdtrain").propagate = True` does so.
    """
    handler = next((each for each in LOGGER.handlers if isinstance(each, ConsoleHandler)), None)
    if handler is None:
        handler = ConsoleHandler()
        LOGGER.addHandler(handler)
        LOGGER.propagate = False
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.INFO)
    for old in list(handler.filters):
        handler.removeFilter(old)
    handler.addFilter(RankFilter(rank))


def say(text: str, stream: TextIO | None = None) -> None:
    """Log what ends this rank as it is, or write it to `stream`."""
    if stream is None:
        LOGGER.error("%s", text, extra={VERBATIM: True})
    else:
        with contextlib.suppress(OSError, ValueError):
            _write(stream, text)


class RankLog:
    """The file to which this rank's messages go as well, from `start` to `close`.

    A thread writes them, so that a rank that reports a failure never waits for a disk.
    """

    def __init__(self) -> None:
        self._handler: QueueHandler | None = None
        self._thread: threading.Thread | None = None
        self._messages: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()

    def start(self, file: Path, heading: str) -> None:
        """Append to `file`, after a line with `heading`; an earlier file is closed.

        Raises:
            OSError: the file cannot be written.
        """
        self.close()
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(f"---- {time.strftime('%Y-%m-%d %H:%M:%S')} {heading}\n")
        self._handler = QueueHandler(self._messages)
        self._thread = threading.Thread(target=_write_to, args=(file, self._messages), name="hvdtrain-log", daemon=True)
        self._thread.start()
        LOGGER.addHandler(self._handler)

    def close(self) -> None:
        """Write what was logged so far, and close the file."""
        if self._handler is not None and self._thread is not None:
            LOGGER.removeHandler(self._handler)
            self._messages.put(None)
            self._thread.join()
            self._handler = self._thread = None


def _write_to(file: Path, messages: "queue.SimpleQueue[logging.LogRecord | None]") -> None:
    handler = logging.FileHandler(file, encoding="utf-8", errors="replace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    while (record := messages.get()) is not None:
        handler.handle(record)
    handler.close()


def on_terminal(environment: Environment, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether standard output is a terminal on which lines can be redrawn.

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


def drop_unreadable_output() -> None:
    """Redirect standard streams whose reader is gone, or whose disk is full, to the null device."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
        except (ValueError, AttributeError):  # a closed stream, or none
            continue


def _write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()
