"""The control channel over any transport that takes messages to rank 0 and back.

Rank 0 gathers one signed part from each rank and publishes one signed answer. While it waits it publishes who
is missing, so that every rank can name them when its patience ends. Beside the exchanges, the status board shows what
each rank posted last.
"""

import contextlib
import json
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NoReturn, Protocol

from hvdtrain.config.errors import LaunchError, MissingRankError
from hvdtrain.runtime.control.channel import ControlChannel, OnWait, flush_output, latest_post, name_ranks
from hvdtrain.runtime.control.signing import Signer

_MOST_NAMED = 64
"""Missing ranks told to the others; keeps the message small enough that MPI sends it without a handshake."""
_VERSION_BYTES = 8
PATIENCE_S = 3.0
"""Messages of a rank that are wrongly signed for so long are its own: it has another secret."""
APART_S = 2.5
"""Wrongly signed messages further apart have nothing to do with one another."""
_LONGEST_S = 5.0
"""What one request counts at most: each gives up after a second or two, unless the whole process stood still."""


class Transport(Protocol):
    """Takes messages to rank 0 and back, without looking into them, and without waiting except where told to.

    All may raise LaunchError when the transport itself is broken.
    """

    pauses: tuple[float, float]
    """Seconds between two looks for a message, at first and at most."""
    others_may_write: bool
    """Whether processes that are not ranks may write messages, or replace those of ranks."""

    def send(self, sequence: int, message: bytes) -> None:
        """Send this rank's part of exchange ``sequence`` to rank 0."""

    def received(self, sequence: int, ranks: Collection[int], wait: int = 0) -> Iterable[tuple[int, bytes]]:
        """On rank 0: return the parts of ``ranks``, which it has not taken before, as far as they are there.

        It may wait for all of them for ``wait`` seconds.
        """

    def publish(self, sequence: int, message: bytes, ranks: Collection[int], *, final: bool = True) -> None:
        """On rank 0: send an answer to ``ranks``; a later answer may replace an earlier one, which was not final."""

    def published(self, sequence: int, wait: int = 0) -> bytes | None:
        """Return an answer of rank 0, or None; it may wait for the final one for ``wait`` seconds."""

    def finish(self, sequence: int, deadline: float) -> None:
        """On rank 0, after the final answer: see it off, until ``deadline`` (time.monotonic) at most."""

    def send_failure(self, message: bytes) -> None:
        """Send a failure report to all other ranks."""

    def received_failures(self, known: Collection[int]) -> dict[int, bytes]:
        """Return failure reports of ranks that are not yet ``known``; may leave some for the next call."""

    def post(self, message: bytes) -> None:
        """Put this rank's board in place of its earlier one."""

    def posted(self) -> Mapping[int, bytes]:
        """Return the boards of the other ranks, as far as they are here."""

    def abort(self, code: int) -> NoReturn:
        """End the job."""

    def close(self) -> None:
        """Give back what is held."""


@dataclass(frozen=True)
class _Answer:
    """Answer of rank 0 to one exchange."""

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
        answer, parts, begin = cls(**json.loads(header)), [], 0
        for length in answer.lengths:
            parts.append(rest[begin : begin + length])
            begin += length
        return answer, parts


def _pauses(first: float, longest: float) -> Iterator[float]:
    """Yield seconds to sleep between two looks, growing, so that waiting burns no core."""
    pause = first
    while True:
        yield pause
        pause = min(pause * 1.5, longest)


def _rest(pause: float, *, since: float, deadline: float) -> None:
    """Sleep until `pause` seconds are over since a look began, or until `deadline`."""
    time.sleep(max(0.0, min(since + pause, deadline) - time.monotonic()))


def _wait_s(deadline: float) -> int:
    """Return the seconds that a transport may wait: one, after which it is told who is missing; none at the end."""
    return 1 if deadline - time.monotonic() >= 2.0 else 0


class _Refusals:
    """Decides about wrongly signed messages during one exchange.

    Args:
        rank: this process's rank. Rank 0 gives up first, while the others still send their messages again.
        others_may_write: whether processes that are not ranks may have written them; if not, none is passed over.
    """

    def __init__(self, rank: int, others_may_write: bool) -> None:
        patience = PATIENCE_S if rank == 0 else PATIENCE_S + 1.0
        self._patience = patience if others_may_write else 0.0
        self.seen: dict[int, tuple[float, float, LaunchError]] = {}
        """Of each sender the times of the first and the last such message, and the error of the last."""

    def note(self, sender: int, error: LaunchError) -> None:
        """Note a message of `sender`, and raise `error` where they have been coming for too long."""
        now = time.monotonic()
        first, last, _ = self.seen.get(sender, (now, now, error))
        first = now if now - last > APART_S else first
        self.seen[sender] = first, now, error
        if now - first >= self._patience:
            raise error

    def of(self, senders: Sequence[int]) -> LaunchError | None:
        """Return the error of one of `senders`, if any sent such a message."""
        return next((self.seen[sender][2] for sender in senders if sender in self.seen), None)


class RootedChannel(ControlChannel):
    """A control channel whose messages pass through rank 0.

    What a rank has posted travels together, signed and with a version: an older board never replaces a newer one, and a
    forged one is passed over.
    """

    def __init__(self, transport: Transport, signer: Signer, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._transport = transport
        self._signer = signer
        self._sequence = 0
        self._exchanging = threading.Lock()
        self._reading_failures = threading.Lock()
        self._failures: dict[int, str] = {}
        self._closed = False
        self._board = threading.Lock()
        self._version = 0
        """Of this rank's own board."""
        self._boards: dict[int, tuple[int, dict[str, bytes]]] = {}
        """Of each other rank the version and what it has posted, in this order."""

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
        with self._measured(), self._board:
            super().post(key, value)
            self._version += 1
            text = json.dumps({name: value.decode("latin-1") for name, value in self._posted.items()}).encode()
            message = self._signer.sign(text, purpose="board", sequence=self._version, sender=self.rank)
            self._transport.post(self._version.to_bytes(_VERSION_BYTES, "big") + message)

    def read(self, key: str) -> dict[int, bytes]:
        with self._measured(), self._board:
            for rank, message in self._transport.posted().items():
                version = int.from_bytes(message[:_VERSION_BYTES], "big")
                if version > self._boards.get(rank, (-1, {}))[0]:
                    with contextlib.suppress(LaunchError):  # forged: as if it had not come
                        signed = message[_VERSION_BYTES:]
                        text = self._signer.open(signed, purpose="board", sequence=version, sender=rank)
                        entries = {name: value.encode("latin-1") for name, value in json.loads(text).items()}
                        self._boards[rank] = version, entries
            boards = {rank: entries for rank, (_, entries) in self._boards.items()} | {self.rank: self._posted}
            found = {rank: latest_post(entries, key) for rank, entries in sorted(boards.items())}
            return {rank: value for rank, value in found.items() if value is not None}

    def report_failure(self, text: str) -> None:
        message = self._signer.sign(text.encode(), purpose="failure", sequence=0, sender=self.rank)
        with contextlib.suppress(Exception):  # this process fails already, and for another reason
            self._transport.send_failure(message)

    def failures(self) -> dict[int, str]:
        with self._reading_failures:
            if not self._closed:
                # The launcher may be gone; others learn of it elsewhere.
                with contextlib.suppress(Exception), self._measured():
                    for rank, message in self._transport.received_failures(self._failures.keys()).items():
                        with contextlib.suppress(LaunchError):  # forged: as if it had not come
                            text = self._signer.open(message, purpose="failure", sequence=0, sender=rank)
                            self._failures.setdefault(rank, text.decode(errors="replace"))
            return dict(self._failures)

    def abort(self, code: int) -> NoReturn:
        flush_output()
        self._transport.abort(code)

    def close(self) -> None:
        with self._reading_failures:
            if not self._closed:
                self._closed = True
                self._transport.close()

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        """Context of a request, whose seconds count as unanswered where it raises."""
        begun = time.monotonic()
        try:
            yield
        except Exception:
            self.unanswered_s += min(time.monotonic() - begun, _LONGEST_S)
            raise

    def _exchange(
        self, payload: bytes, timeout: float, *, refuse_stale: bool = True, on_wait: OnWait | None = None
    ) -> list[bytes]:
        with self._exchanging:
            sequence, self._sequence = self._sequence, self._sequence + 1

            def waits(missing: Sequence[int]) -> None:
                if on_wait is not None:
                    on_wait(missing)
                self.while_waiting()

            if self.rank != 0:
                return self._follow(
                    sequence, payload=payload, timeout=timeout, refuse_stale=refuse_stale, on_wait=waits
                )
            deadline, others = time.monotonic() + timeout, range(1, self.size)
            try:
                parts = self._gather(sequence, payload=payload, timeout=timeout, deadline=deadline, on_wait=waits)
            except LaunchError as error:
                late = isinstance(error, MissingRankError)
                self._publish(sequence, _Answer("failed", text=error.message, late=late).encode(), others)
                raise
            done = _Answer("done", lengths=[len(part) for part in parts])
            self._publish(sequence, done.encode(parts), others)
            self._transport.finish(sequence, deadline)
            return parts

    def _gather(self, sequence: int, payload: bytes, timeout: float, deadline: float, on_wait: OnWait) -> list[bytes]:
        """Return every rank's part; tell those that wait who is missing, about once a second."""
        parts, missing = {0: payload}, list(range(1, self.size))
        pauses, interval = _pauses(*self._transport.pauses), max(0.001 * self.size, min(1.0, timeout / 4))
        refusals = _Refusals(self.rank, self._transport.others_may_write)
        telling = time.monotonic() + interval
        while missing:
            now = time.monotonic()
            tell, before = now >= min(telling, deadline), len(parts)
            wait = 0 if tell else _wait_s(deadline)
            for rank, message in self._transport.received(sequence, missing, wait):
                try:
                    parts[rank] = self._signer.open(message, purpose="part", sequence=sequence, sender=rank)
                except LaunchError as error:
                    refusals.note(rank, error)
            missing = [rank for rank in missing if rank not in parts]
            if missing and now >= deadline:
                raise refusals.of(missing) or self._late(missing, timeout)
            if missing and tell:
                waiting = _Answer("waiting", missing=missing[:_MOST_NAMED]).encode()
                self._publish(sequence, waiting, parts.keys() - {0}, final=False)
                on_wait(missing)
                telling = now + interval
            if len(parts) > before:
                pauses = _pauses(*self._transport.pauses)
            if missing:
                _rest(next(pauses), since=now, deadline=deadline)
        return [parts[rank] for rank in range(self.size)]

    def _publish(self, sequence: int, answer: bytes, ranks: Collection[int], *, final: bool = True) -> None:
        message = self._signer.sign(answer, purpose="answer", sequence=sequence, sender=0)
        self._transport.publish(sequence, message, ranks, final=final)

    def _follow(
        self, sequence: int, payload: bytes, timeout: float, refuse_stale: bool, on_wait: OnWait
    ) -> list[bytes]:
        # Rank 0 gives up first, so that all ranks raise with its words.
        deadline = time.monotonic() + timeout + min(1.0, 0.2 * timeout)
        pauses, missing, telling = _pauses(*self._transport.pauses), [0], time.monotonic() + 1.0
        refusals, is_missing = _Refusals(self.rank, self._transport.others_may_write), False
        message = self._signer.sign(payload, purpose="part", sequence=sequence, sender=self.rank)
        self._transport.send(sequence, message)
        while True:
            now = time.monotonic()
            published, text = self._transport.published(sequence, _wait_s(deadline)), None
            try:
                if published is not None:
                    text = self._signer.open(published, purpose="answer", sequence=sequence, sender=0)
            except LaunchError as error:
                refusals.note(0, error)
            if text is not None:
                answer, parts = _Answer.decode(text)
                done = answer.state == "done"
                if done and len(parts) == self.size and parts[self.rank] == payload:
                    return parts
                if answer.state == "failed" or (refuse_stale and done):
                    kind = MissingRankError if answer.late else LaunchError
                    raise kind(answer.text or f"Rank 0 lost this rank's part of exchange {sequence}.")
                is_missing = self.rank in answer.missing
                missing = [rank for rank in answer.missing if rank != self.rank] or [0]
            if time.monotonic() >= telling:
                on_wait(missing)
                telling += 1.0
                if self._transport.others_may_write and (is_missing or refusals.seen):
                    self._transport.send(sequence, message)
            if now >= deadline:
                raise refusals.of([0]) or self._late(missing, timeout)
            _rest(next(pauses), since=now, deadline=deadline)

    def _late(self, missing: Sequence[int], timeout: float) -> LaunchError:
        return MissingRankError(
            f"No message from {name_ranks(missing)} of {self.size} within {timeout:g} s: not started, still "
            "starting, or hanging."
        )
