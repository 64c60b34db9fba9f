"""The control channel over the HTTP store that ``horovodrun --gloo`` keeps for its workers.

The store knows PUT and GET of ``/<scope>/<key>`` (404 until written) and, from RendezvousHandler on, DELETE.
It has no authentication: every message is signed. Horovod's own client unpickles its answers: it is not used.
"""

import contextlib
import hashlib
import http.client
import os
import secrets
import time
from collections.abc import Collection, Mapping
from typing import NoReturn

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.channel import end_process
from hvdtrain.runtime.control.rooted import RootedChannel
from hvdtrain.runtime.control.signing import Signer, secret_from_environment, secret_from_key_file
from hvdtrain.runtime.launchers import Environment

_CONNECT_S = 1.0
"""A call that the full queue of a busy server has dropped is made anew: the system itself would wait 1, 2, 4 … s."""
_FAILURES_A_CALL = 64
"""Ranks asked for a failure report in one look, so that a look stays short in a large job."""


class Store:
    """PUT, GET and DELETE on Horovod's rendezvous store."""

    def __init__(self, address: str, port: int, patience: float = 20.0) -> None:
        """Ask for ``patience`` seconds, at least one, while the server does not answer."""
        self._address = address
        self._port = port
        self._patience = patience

    def with_patience(self, patience: float) -> "Store":
        """Return the same store, asked for so many seconds."""
        return Store(self._address, self._port, patience)

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Write a value, in place of an earlier one."""
        status, _ = self._request("PUT", f"/{scope}/{key}", value)
        if status != http.client.OK:
            raise LaunchError(f"Horovod's store at {self} refused to keep {scope}/{key} (HTTP {status}).")

    def get(self, scope: str, key: str) -> bytes | None:
        """Return a value, or None while it is not written (or is empty)."""
        status, body = self._request("GET", f"/{scope}/{key}")
        return body or None if status == http.client.OK else None

    def delete(self, scope: str, key: str) -> None:
        """Remove a value, where the store can do that."""
        self._request("DELETE", f"/{scope}/{key}")

    def __str__(self) -> str:
        return f"{self._address}:{self._port}"

    def _request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Ask until there is an answer: many ranks at once overrun the short queue of the server.

        Raises:
            LaunchError: none came for ``patience`` seconds.
        """
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._ask(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() > deadline:
                    raise LaunchError(f"Horovod's store at {self} does not answer ({error}).") from error
                time.sleep(0.02)

    def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._address, self._port, timeout=_CONNECT_S)
        with contextlib.closing(connection):
            connection.connect()
            connection.sock.settimeout(max(1.0, self._patience))
            connection.request(method, path, body=body)
            response = connection.getresponse()
            return response.status, response.read()


class StoreTransport:
    """The values of one scope as messages to rank 0 and back."""

    def __init__(self, store: Store, scope: str, rank: int, size: int, *, consume: bool = False) -> None:
        """With ``consume`` rank 0 empties each part it has read, so that a later channel finds none."""
        self.longest_pause = max(0.05, 0.001 * size)  # some 1,000 requests a second, whatever the size
        self._store = store
        self._scope = scope
        self._rank = rank
        self._size = size
        self._consume = consume
        self._next_asked = 0

    def send(self, sequence: int, message: bytes) -> None:
        """See `Transport.send`; the part of the exchange before was read, as its answer shows."""
        self._store.put(self._scope, f"part-{sequence}-{self._rank}", message)
        if sequence > 0:
            self._store.delete(self._scope, f"part-{sequence - 1}-{self._rank}")

    def received(self, rank: int, sequence: int) -> bytes | None:
        """See `Transport.received`."""
        key = f"part-{sequence}-{rank}"
        message = self._store.get(self._scope, key)
        if self._consume and message is not None:
            self._store.put(self._scope, key, b"")
        return message

    def publish(self, sequence: int, message: bytes, ranks: Collection[int]) -> None:
        """See `Transport.publish`; one value for all ranks."""
        self._store.put(self._scope, f"answer-{sequence}", message)

    def published(self, sequence: int) -> bytes | None:
        """See `Transport.published`."""
        return self._store.get(self._scope, f"answer-{sequence}")

    def finish(self, sequence: int, deadline: float) -> None:
        """See `Transport.finish`; all have read the answer before, or they would not have sent a part."""
        if sequence > 0:
            self._store.delete(self._scope, f"answer-{sequence - 1}")

    def send_failure(self, message: bytes) -> None:
        """See `Transport.send_failure`; one value tells that there are any, so that a look is one request."""
        store = self._store.with_patience(1.0)
        store.put(self._scope, f"failure-{self._rank}", message)
        store.put(self._scope, "failed", str(self._rank).encode())

    def received_failures(self, known: Collection[int]) -> dict[int, bytes]:
        """See `Transport.received_failures`."""
        store = self._store.with_patience(0.0)
        hint = store.get(self._scope, "failed")
        if hint is None:
            return {}
        asked = dict.fromkeys([int(hint), *self._turn()])
        ranks = [rank for rank in asked if rank != self._rank and rank not in known]
        messages = {rank: store.get(self._scope, f"failure-{rank}") for rank in ranks}
        return {rank: message for rank, message in messages.items() if message is not None}

    def post(self, message: bytes) -> None:
        """See `BoardTransport.post`."""
        self._store.with_patience(1.0).put(self._scope, f"board-{self._rank}", message)

    def posted(self) -> dict[int, bytes]:
        """See `BoardTransport.posted`."""
        store = self._store.with_patience(1.0)
        boards = {rank: store.get(self._scope, f"board-{rank}") for rank in range(self._size) if rank != self._rank}
        return {rank: board for rank, board in boards.items() if board is not None}

    def abort(self, code: int) -> NoReturn:
        """End this process: horovodrun ends the others of a job where one ends with an error."""
        end_process(code or 1)

    def close(self) -> None:
        """Do nothing: no connection is held, and the store ends with horovodrun."""

    def _turn(self) -> list[int]:
        """Return the next ranks to ask, round and round."""
        first, count = self._next_asked, min(self._size, _FAILURES_A_CALL)
        self._next_asked = (first + count) % self._size
        return [(first + i) % self._size for i in range(count)]


def open_store(
    environment: Environment, *, timeout: float, environ: Mapping[str, str] = os.environ, generation: int = 0
) -> RootedChannel:
    """Open the channel over the store whose address horovodrun gave in the environment.

    Every rank contributes a random number to the session's name, which all later signatures cover: messages
    of another job, or of an earlier channel of this one, do not fit.

    Raises:
        LaunchError: a rank is missing, the secrets differ, or the store does not answer.
    """
    store = Store(environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    rank, size, job = environment.rank, environment.size, f"{environment.job_id} {generation}"
    secret = secret_from_environment(environ) or secret_from_key_file(environment.job_id, environ)
    lobby = StoreTransport(store, f"hvdtrain-lobby-{generation}", rank, size, consume=True)
    greeting = RootedChannel(lobby, Signer(secret, job), rank, size)
    numbers = greeting.greet(secrets.token_bytes(16), timeout=timeout)
    session = hashlib.sha256(b"".join(numbers)).hexdigest()[:32]
    room = StoreTransport(store, f"hvdtrain-{session}", rank, size)
    return RootedChannel(room, Signer(secret, f"{job} {session}"), rank, size)
