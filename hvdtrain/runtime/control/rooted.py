"""The control channel over any transport that takes messages to rank 0 and back.

Rank 0 gathers one signed part from each rank and publishes one signed answer. While it waits it publishes who
is missing, so that every rank can name them when its patience ends.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NoReturn, Protocol

from hvdtrain.config.errors import LaunchError, MissingRankError
from hvdtrain.runtime.control.board import BoardTransport, StatusBoard
from hvdtrain.runtime.control.channel import OnWait, Refusals, UnansweredTime, flush_output, name_ranks
from hvdtrain.runtime.control.signing import Signer

_MOST_NAMED = 64
"""Missing ranks told to the others; keeps the message small enough that MPI sends it without a handshake."""


class Transport(BoardTransport, Protocol):
    """Takes messages to rank 0 and back, without waiting and without looking into them.

    All may raise LaunchError when the transport itself is broken.
    """

    longest_pause: float
    """Seconds to which the pause between two looks for a message grows."""
    others_may_write: bool
    """Whether processes that are no ranks may write messages, or replace those of ranks."""

    def send(self, sequence: int, message: bytes) -> None:
        """Send this rank's part of exchange ``sequence`` to rank 0."""

    def received(self, rank: int, sequence: int) -> bytes | None:
        """On rank 0: return the part of ``rank``, or None while it is not there."""

    def publish(self, sequence: int, message: bytes, ranks: Collection[int]) -> None:
        """On rank 0: send an answer to ``ranks``; a later answer may replace an earlier one."""

    def published(self, sequence: int) -> bytes | None:
        """Return an answer of rank 0, or None while there is none."""

    def finish(self, sequence: int, deadline: float) -> None:
        """On rank 0, after the final answer: see it off, until ``deadline`` (time.monotonic) at most."""

    def send_failure(self, message: bytes) -> None:
        """Send a failure report to all other ranks."""

    def received_failures(self, known: Collection[int]) -> dict[int, bytes]:
        """Return failure reports of ranks that are not yet ``known``; may leave some for the next call."""

    def abort(self, code: int) -> NoReturn:
        """End the job."""

    def close(self) -> None:
        """Give back what is held."""


@dataclass(frozen=True)
class _Answer:
    """What rank 0 tells the others about one exchange."""

    state: Literal["waiting", "done", "failed"]
    text: str = ""
    missing: Sequence[int] = ()
    lengths: Sequence[int] = ()
    late: bool = False
    """Of a failure: whether ranks did not come."""

    def encode(self, parts: Sequence[bytes] = ()) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n" + b"".join(parts)

    @classmethod
    def decode(cls, message: bytes) -> tuple["_Answer", list[bytes]]:
        header, _, rest = message.partition(b"\n")
        answer = cls(**json.loads(header))
        ends = [sum(answer.lengths[: i + 1]) for i in range(len(answer.lengths))]
        return answer, [rest[end - n : end] for end, n in zip(ends, answer.lengths, strict=True)]


class _Pause:
    """Sleeps that grow from 1 ms, so that waiting burns no core."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self.reset()

    def reset(self) -> None:
        self._next = 0.001

    def sleep(self) -> None:
        time.sleep(self._next)
        self._next = min(self._next * 1.5, self._longest)


class RootedChannel:
    """A `ControlChannel` whose messages pass through rank 0."""

    def __init__(self, transport: Transport, signer: Signer, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._transport = transport
        self._signer = signer
        self._sequence = 0
        self._exchanging = threading.Lock()
        self._reading_failures = threading.Lock()
        self._failures: dict[int, str] = {}
        self._closed = False
        self.while_waiting: Callable[[], None] = _do_nothing
        """Called about once a second while ranks are missing in an exchange; raises where they will not come."""
        self._board = StatusBoard(transport, signer, rank)
        self._unanswered = UnansweredTime()

    @property
    def unanswered_s(self) -> float:
        return self._unanswered.seconds

    def exchange(self, payload: bytes, *, timeout: float) -> list[bytes]:
        return self._exchange(payload, timeout)

    def greet(self, payload: bytes, *, timeout: float) -> list[bytes]:
        """Exchange where an earlier channel's answer may still lie about; ``payload`` must be random.

        An answer that does not hold this rank's payload is not for it, and is waited out.
        """
        return self._exchange(payload, timeout, refuse_stale=False)

    def barrier(self, timeout: float, *, on_wait: OnWait | None = None) -> None:
        self._exchange(b"", timeout, on_wait=on_wait)

    def post(self, key: str, value: bytes) -> None:
        with self._unanswered.measured():
            self._board.post(key, value)

    def read(self, key: str) -> dict[int, bytes]:
        with self._unanswered.measured():
            return self._board.read(key)

    def report_failure(self, text: str) -> None:
        message = self._signer.sign(text.encode(), purpose="failure", sequence=0, sender=self.rank)
        with contextlib.suppress(Exception):  # this process fails already, and for another reason
            self._transport.send_failure(message)

    def failures(self) -> dict[int, str]:
        with self._reading_failures:
            if not self._closed:
                # The launcher may be gone; others learn of it elsewhere.
                with contextlib.suppress(Exception), self._unanswered.measured():
                    self._read_failures()
            return dict(self._failures)

    def abort(self, code: int) -> NoReturn:
        flush_output()
        self._transport.abort(code)

    def close(self) -> None:
        with self._reading_failures:
            if not self._closed:
                self._closed = True
                self._transport.close()

    def _read_failures(self) -> None:
        for rank, message in self._transport.received_failures(self._failures.keys()).items():
            with contextlib.suppress(LaunchError):  # forged: as if it had not come
                text = self._signer.open(message, purpose="failure", sequence=0, sender=rank)
                self._failures.setdefault(rank, text.decode(errors="replace"))

    def _exchange(
        self, payload: bytes, timeout: float, *, refuse_stale: bool = True, on_wait: OnWait | None = None
    ) -> list[bytes]:
        with self._exchanging:
            sequence, self._sequence = self._sequence, self._sequence + 1
            say = on_wait or _wait_silently

            def waits(missing: Sequence[int]) -> None:
                say(missing)
                self.while_waiting()

            if self.rank == 0:
                return self._lead(sequence, payload, timeout, waits)
            return self._follow(sequence, payload=payload, timeout=timeout, refuse_stale=refuse_stale, on_wait=waits)

    def _lead(self, sequence: int, payload: bytes, timeout: float, on_wait: OnWait) -> list[bytes]:
        deadline = time.monotonic() + timeout
        try:
            parts = self._gather(sequence, payload=payload, timeout=timeout, deadline=deadline, on_wait=on_wait)
        except LaunchError as error:
            late = isinstance(error, MissingRankError)
            self._publish(sequence, _Answer("failed", text=error.message, late=late).encode(), range(1, self.size))
            raise
        done = _Answer("done", lengths=[len(part) for part in parts])
        self._publish(sequence, done.encode(parts), range(1, self.size))
        self._transport.finish(sequence, deadline)
        return parts

    def _gather(self, sequence: int, payload: bytes, timeout: float, deadline: float, on_wait: OnWait) -> list[bytes]:
        """Return every rank's part; tell those that wait who is missing, about once a second."""
        parts, missing = {0: payload}, list(range(1, self.size))
        pause, interval = _Pause(self._transport.longest_pause), max(0.001 * self.size, min(1.0, timeout / 4))
        refusals, telling = self._refusals(), time.monotonic() + interval
        while missing:
            now = time.monotonic()
            tell = now >= min(telling, deadline)
            came = self._take(sequence, missing if tell else missing[:1], refusals)
            parts.update(came)
            missing = [rank for rank in missing if rank not in came]
            if missing and now >= deadline:
                raise refusals.of(missing) or self._late(missing, timeout)
            if missing and tell:
                waiting = _Answer("waiting", missing=missing[:_MOST_NAMED]).encode()
                self._publish(sequence, waiting, parts.keys() - {0})
                on_wait(missing)
                telling = now + interval
            if came:
                pause.reset()
            elif missing:
                pause.sleep()
        return [parts[rank] for rank in range(self.size)]

    def _take(self, sequence: int, ranks: Sequence[int], refusals: Refusals) -> dict[int, bytes]:
        """Return the parts of those of ``ranks`` that are there."""
        parts = {}
        for rank in ranks:
            message = self._transport.received(rank, sequence)
            try:
                if message is not None:
                    parts[rank] = self._signer.open(message, purpose="part", sequence=sequence, sender=rank)
            except LaunchError as error:
                refusals.note(rank, error)
        return parts

    def _refusals(self) -> Refusals:
        return Refusals(self.rank, self._transport.others_may_write)

    def _publish(self, sequence: int, answer: bytes, ranks: Collection[int]) -> None:
        message = self._signer.sign(answer, purpose="answer", sequence=sequence, sender=0)
        self._transport.publish(sequence, message, ranks)

    def _follow(
        self, sequence: int, payload: bytes, timeout: float, refuse_stale: bool, on_wait: OnWait
    ) -> list[bytes]:
        # Rank 0 gives up first, so that all ranks raise with its words.
        deadline = time.monotonic() + timeout + min(1.0, 0.2 * timeout)
        pause, missing, telling = _Pause(self._transport.longest_pause), [0], time.monotonic() + 1.0
        refusals, is_missing = self._refusals(), False
        message = self._signer.sign(payload, purpose="part", sequence=sequence, sender=self.rank)
        self._transport.send(sequence, message)
        while time.monotonic() < deadline:
            answer, parts = self._look(sequence, refusals)
            if answer is not None:
                if self._is_mine(answer, parts, payload):
                    return parts
                if answer.state == "failed" or (refuse_stale and answer.state == "done"):
                    kind = MissingRankError if answer.late else LaunchError
                    raise kind(answer.text or f"Rank 0 lost this rank's part of exchange {sequence}.")
                is_missing = self.rank in answer.missing
                missing = [rank for rank in answer.missing if rank != self.rank] or [0]
            if time.monotonic() >= telling:
                on_wait(missing)
                telling += 1.0
                if self._transport.others_may_write and (is_missing or refusals):
                    self._transport.send(sequence, message)
            pause.sleep()
        raise refusals.of([0]) or self._late(missing, timeout)

    def _look(self, sequence: int, refusals: Refusals) -> tuple[_Answer | None, list[bytes]]:
        """Return rank 0's answer and what it holds, or None while there is none."""
        published = self._transport.published(sequence)
        try:
            if published is not None:
                return _Answer.decode(self._signer.open(published, purpose="answer", sequence=sequence, sender=0))
        except LaunchError as error:
            refusals.note(0, error)
        return None, []

    def _is_mine(self, answer: _Answer, parts: Sequence[bytes], payload: bytes) -> bool:
        return answer.state == "done" and len(parts) == self.size and parts[self.rank] == payload

    def _late(self, missing: Sequence[int], timeout: float) -> LaunchError:
        return MissingRankError(
            f"No message from {name_ranks(missing)} of {self.size} within {timeout:g} s: not started, still "
            "starting, or hanging."
        )


def _do_nothing() -> None:
    """Wait on: nothing is known of the others."""


def _wait_silently(missing: Sequence[int]) -> None:
    """Say nothing: most exchanges take milliseconds."""
