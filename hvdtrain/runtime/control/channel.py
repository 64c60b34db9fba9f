"""The control channel: how ranks talk to one another outside the collectives.

It is up before any TensorFlow operation and needs neither TensorFlow nor Horovod, so that it still works
while collectives hang: agreement at the start, failure reports, the end of the job. Messages pass
through rank 0. Our own are small (settings, tracebacks); only a user's own script sends larger ones.
"""

import contextlib
import fcntl
import json
import os
import stat
import sys
import termios
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

OnWait = Callable[[Sequence[int]], None]
"""Called about once a second while ranks are missing, with these."""


class ControlChannel:
    """Messages between the ranks of one job; as it stands, of a job of one process.

    Exchanges and barriers must come in the same order on every rank. Everything else may be called from any
    thread, also while another one is in `exchange`: failures, and the status board (`post`, `read`), which keeps
    each rank's latest value of each key for whoever wants to see it.

    Args:
        rank: this process's rank.
        size: the number of ranks.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.while_waiting: Callable[[], None] = lambda: None
        """Called about once a second while ranks are missing in an exchange; raises where they will not come."""
        self.unanswered_s = 0.0
        """Seconds so far in which `post`, `read` and `failures` waited for answers that did not come."""
        self._posted: dict[str, bytes] = {}
        """What this rank has posted, in this order."""

    def exchange(self, payload: bytes, *, timeout: float) -> list[bytes]:
        """Give ``payload`` to every rank and return what each gave, in rank order.

        Raises:
            LaunchError: a rank did not come within ``timeout`` seconds (it is named), or a message was not
                signed with the job's secret (its sender is named). The channel is of no further use then,
                except for failures and the end.
        """
        return [payload]

    def barrier(self, timeout: float, *, on_wait: OnWait | None = None) -> None:
        """Wait until every rank is here, as `exchange` does."""

    def post(self, key: str, value: bytes) -> None:
        """Put ``value`` on the status board, in place of this rank's earlier one under ``key``; b"" removes it.

        Keep it short and the keys few: a rank's whole board travels with each post.

        Raises:
            LaunchError: the transport is broken.
        """
        self._posted.pop(key, None)
        if value:
            self._posted[key] = value

    def read(self, key: str) -> dict[int, bytes]:
        """Return, by rank, what was posted last under ``key`` or below it (``key/…``), this rank's too.

        It shows what has arrived so far and does not wait for more. Over the store of ``horovodrun`` it costs one
        request.

        Raises:
            LaunchError: the transport is broken.
        """
        value = latest_post(self._posted, key)
        return {} if value is None else {self.rank: value}

    def report_failure(self, text: str) -> None:
        """Tell all other ranks why this one fails; takes at most about two seconds and never raises."""

    def failures(self) -> dict[int, str]:
        """Return what other ranks have reported so far, by rank; does not wait and never raises."""
        return {}

    def abort(self, code: int) -> NoReturn:
        """End the whole job, as far as the launcher lets one process do that, with exit code ``code``."""
        end_process(code)

    def close(self) -> None:
        """Give back what the channel holds; does not wait for the other ranks. Closing twice is fine."""


def gather(control: ControlChannel, value: Any, *, timeout: float) -> list[Any]:
    """Gather every rank's `value`, of JSON types, in rank order. Collective.

    Raises:
        LaunchError: a rank did not come within `timeout` seconds.
    """
    return [json.loads(text) for text in control.exchange(json.dumps(value).encode(), timeout=timeout)]


def latest_post(entries: Mapping[str, bytes], key: str) -> bytes | None:
    """Return the value under `key` or below it that was posted last; `entries` are in the order of posts."""
    under = [value for name, value in entries.items() if name == key or name.startswith(f"{key}/")]
    return under[-1] if under else None


def end_process(code: int) -> NoReturn:
    """End this process at once with exit code ``code``, from any thread and without waiting for any other."""
    flush_output()
    let_readers_finish()
    os._exit(code)


def let_readers_finish(seconds: float = 0.2) -> None:
    """Wait until what was written to a standard stream that is a pipe has been read, but not for long."""
    deadline = time.monotonic() + seconds
    for number in (1, 2):
        with contextlib.suppress(OSError):
            while stat.S_ISFIFO(os.fstat(number).st_mode) and time.monotonic() < deadline:
                if not any(fcntl.ioctl(number, termios.FIONREAD, bytes(4))):  # bytes in the pipe
                    break
                time.sleep(0.002)


def flush_output() -> None:
    """Write out what was printed so far, if it can still be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # a closed pipe, a closed file, no stream at all
            continue


def name_ranks(ranks: Iterable[int], most: int = 8) -> str:
    """Return "rank 3" or "ranks 0-2, 5, 9 and 12 more" with at most ``most`` pieces."""
    ordered = sorted(set(ranks))
    starts = [r for before, r in pairwise([-2, *ordered]) if r != before + 1]
    ends = [r for r, after in pairwise([*ordered, sys.maxsize]) if after != r + 1]
    pieces = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    left = sum(b - a + 1 for a, b in zip(starts[most:], ends[most:], strict=True))
    text = ", ".join(pieces[:most]) + (f" and {left} more" if left else "")
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {text}"
