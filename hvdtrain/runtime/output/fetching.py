"""Brings what ranks of other hosts write to the primary, where it cannot be seen otherwise."""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.channel import ControlChannel

BOARD = "log"
MOST_AT_ONCE = 16_384
"""Bytes of a post: a rank's whole board travels with each of its posts."""
MOST_AT_END = 4 * 2**20
"""Bytes of each rank at the end; of a longer file its end."""
EVERY_S = 10.0
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Tail:
    """The end of a file."""

    process: int
    """Whose it is: another process begins another file."""
    end: int
    """Bytes of the whole file."""
    data: bytes

    @classmethod
    def of(cls, file: Path, most: int) -> "Tail":
        """Return at most `most` bytes of the end of `file`."""
        with file.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, end - most))
            return cls(os.getpid(), end, stream.read(most))

    def encode(self) -> bytes:
        """Return it as a message."""
        return json.dumps([self.process, self.end]).encode() + b"\n" + self.data

    @classmethod
    def decode(cls, message: bytes) -> "Tail | None":
        """Return what is in a message; None where there is nothing."""
        head, _, data = message.partition(b"\n")
        if not head:
            return None
        process, end = json.loads(head)
        return cls(process, end, data)


class LogFetcher:
    """Posts the end of this rank's file every few seconds, or writes what others have posted into `folder`.

    Args:
        control: the channel between the ranks.
        sends: this rank's file, which the primary cannot see; None where it can.
        folder: of the primary; None on other ranks.
    """

    ends_job = False

    def __init__(self, control: ControlChannel, sends: Path | None, folder: Path | None) -> None:
        self._control = control
        self._sends = sends
        self._folder = folder
        self._next = 0.0
        self._sent = 0
        self._known: dict[int, tuple[int, int]] = {}
        """The process of each rank, and how much of its file is written."""

    def look(self, now: float) -> None:
        """Post or write, every few seconds."""
        if now < self._next:
            return
        self._next = now + EVERY_S
        self.exchange_tails()

    def exchange_tails(self) -> None:
        """Post or write at once, without waiting for anybody."""
        with contextlib.suppress(LaunchError, OSError):
            if self._sends is not None:
                tail = Tail.of(self._sends, MOST_AT_ONCE)
                if tail.end != self._sent:
                    self._control.post(BOARD, tail.encode())
                    self._sent = tail.end
            elif self._folder is not None:
                self._write(self._control.read(BOARD))

    def finish(self) -> None:
        """Bring the whole files, up to `MOST_AT_END`; every rank calls it."""
        mine = b"" if self._sends is None else Tail.of(self._sends, MOST_AT_END).encode()
        messages = self._control.exchange(mine, timeout=TIMEOUT_S)
        if self._folder is not None:
            self._write(dict(enumerate(messages)))

    def _write(self, messages: Mapping[int, bytes]) -> None:
        for rank, message in messages.items():
            tail = Tail.decode(message)
            if tail is not None and self._folder is not None:
                self._append(self._folder / f"rank-{rank}.log", rank, tail)

    def _append(self, file: Path, rank: int, tail: Tail) -> None:
        process, known = self._known.get(rank, (tail.process, 0))
        known = known if process == tail.process else 0
        begin = tail.end - len(tail.data)
        if tail.end <= known:
            return
        with file.open("ab") as stream:
            if begin > known:
                stream.write(f"\n---- {begin - known} bytes were not fetched\n".encode())
            stream.write(tail.data[max(0, known - begin) :])
        self._known[rank] = tail.process, tail.end
