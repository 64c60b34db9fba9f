"""Keeps what this rank writes to its standard output and error, by file descriptor, in a file as well."""

import contextlib
import fcntl
import os
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Iterable
from pathlib import Path

from hvdtrain.runtime.control.channel import flush_output
from hvdtrain.runtime.output import relay

STREAMS = (1, 2)
END_S = 2.0
"""To wait at the end for what is still to be copied; a process that the rank has started may keep a stream open."""


class RankOutput:
    """Copies this process's standard streams to a file from `start` to `close`; what they show stays as it is.

    A terminal stays a terminal for whoever asks.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._saved: dict[int, int] = {}
        self.file: Path | None = None
        """Where the copy goes; None while nothing is copied."""

    def start(self, file: Path, heading: str, *, streams: Iterable[int] = STREAMS) -> None:
        """Append to `file` from here on, after a line with `heading`; an earlier copy ends.

        Args:
            file: its folder is made if it is missing.
            heading: what begins here.
            streams: file descriptors of those that are copied.

        Raises:
            OSError: the file cannot be written, or there is no process for it.
        """
        self.close()
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(f"---- {time.strftime('%Y-%m-%d %H:%M:%S')} {heading}\n")
        flush_output()
        pairs = {number: _channel(number) for number in streams}
        with contextlib.ExitStack() as opened:
            for ends in pairs.values():
                for end in ends:
                    opened.callback(os.close, end)
            self._saved = {number: os.dup(number) for number in pairs}
            words = [f"{pairs[number][0]}:{saved}" for number, saved in self._saved.items()]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", relay.__file__, str(file), *words],
                pass_fds=[*(ends[0] for ends in pairs.values()), *self._saved.values()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C on the terminal is for the ranks
            )
            for number, (_, write) in pairs.items():
                os.dup2(write, number)
        self.file = file

    def close(self) -> None:
        """Put the streams back, and wait until everything is copied."""
        flush_output()
        for number, saved in self._saved.items():
            os.dup2(saved, number)
            os.close(saved)
        self._saved = {}
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            self._process = None


def _channel(number: int) -> tuple[int, int]:
    """Return the two ends, to read and to write, of a pipe, or of a terminal where the stream is one."""
    if not os.isatty(number):
        return os.pipe()
    read, write = os.openpty()
    tty.setraw(write)
    size = fcntl.ioctl(number, termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(write, termios.TIOCSWINSZ, size)
    return read, write
