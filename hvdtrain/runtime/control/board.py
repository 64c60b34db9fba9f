"""The status board: what each rank posted last, which all others may read at any time."""

import contextlib
import json
import threading
from collections.abc import Mapping
from typing import Protocol

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.signing import Signer

_VERSION_BYTES = 8


class BoardTransport(Protocol):
    """Carries each rank's board to the others, without waiting and without looking into it."""

    def post(self, message: bytes) -> None:
        """Put this rank's board in place of its earlier one."""

    def posted(self) -> Mapping[int, bytes]:
        """Return the boards of the other ranks, as far as they are here."""


class StatusBoard:
    """The latest value of each key and rank. Every method may be called from any thread.

    A rank's entries travel together, signed and with a version: an older message never replaces a newer one, and a
    forged one is passed over.
    """

    def __init__(self, transport: BoardTransport, signer: Signer, rank: int) -> None:
        self._transport = transport
        self._signer = signer
        self._rank = rank
        self._lock = threading.Lock()
        self._entries: dict[int, _Entries] = {rank: _Entries()}

    def post(self, key: str, value: bytes) -> None:
        with self._lock:
            mine = self._entries[self._rank].with_post(key, value)
            self._entries[self._rank] = mine
            message = self._signer.sign(mine.encode(), purpose="board", sequence=mine.version, sender=self._rank)
            self._transport.post(mine.version.to_bytes(_VERSION_BYTES, "big") + message)

    def read(self, key: str) -> dict[int, bytes]:
        with self._lock:
            for rank, message in self._transport.posted().items():
                with contextlib.suppress(LaunchError):  # forged: as if it had not come
                    self._take(rank, message)
            found = {rank: entries.latest(key) for rank, entries in sorted(self._entries.items())}
            return {rank: value for rank, value in found.items() if value is not None}

    def _take(self, rank: int, message: bytes) -> None:
        version = int.from_bytes(message[:_VERSION_BYTES], "big")
        known = self._entries.get(rank)
        if known is None or version > known.version:
            text = self._signer.open(message[_VERSION_BYTES:], purpose="board", sequence=version, sender=rank)
            self._entries[rank] = _Entries.decode(version, text)


class _Entries:
    """What one rank has posted: for each key the number of the post, and its value."""

    def __init__(self, version: int = 0, values: Mapping[str, tuple[int, bytes]] | None = None) -> None:
        self.version = version
        self._values = dict(values or {})

    def with_post(self, key: str, value: bytes) -> "_Entries":
        """Return the entries after one more post."""
        others = {name: entry for name, entry in self._values.items() if name != key}
        return _Entries(self.version + 1, others | ({key: (self.version + 1, value)} if value else {}))

    def latest(self, key: str) -> bytes | None:
        """Return the value posted last under `key` or below it."""
        under = [entry for name, entry in self._values.items() if name == key or name.startswith(f"{key}/")]
        return max(under)[1] if under else None

    def encode(self) -> bytes:
        header = [[name, number, len(value)] for name, (number, value) in self._values.items()]
        return json.dumps(header).encode() + b"\n" + b"".join(value for _, value in self._values.values())

    @classmethod
    def decode(cls, version: int, text: bytes) -> "_Entries":
        header, _, rest = text.partition(b"\n")
        values, begin = {}, 0
        for name, number, length in json.loads(header):
            values[name] = number, rest[begin : begin + length]
            begin += length
        return cls(version, values)
