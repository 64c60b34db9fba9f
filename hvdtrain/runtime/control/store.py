"""The control channel over the HTTP store that ``horovodrun --gloo``, or rank 0 (`runtime/rendezvous.py`), keeps.

The store knows PUT and GET of ``/<scope>/<key>`` (404 until written) and, from RendezvousHandler on, DELETE; with the
patch `read-together`, GET of ``/<scope>/<key>,<key>…``; with `await-values`, GET that waits for what is not written.
A Horovod without the patch `store-token` takes them from everybody: every message is signed. Horovod's own client
unpickles its answers: it is not used.
"""

import contextlib
import hmac
import http.client
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NoReturn

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.channel import end_process
from hvdtrain.runtime.control.rooted import RootedChannel
from hvdtrain.runtime.control.signing import Signer, secret_from_environment, secret_from_key_file
from hvdtrain.runtime.interfaces import candidates
from hvdtrain.runtime.launchers import LAUNCHER_SECRET_VARIABLE, Environment

_CONNECT_S = 1.0
"""A call that the full queue of a busy server has dropped is made anew: the system itself would wait 1, 2, 4 … s."""
MOST_BYTES = 2**30 + 2**26
"""Of a value: the objects of a script (`hvdtrain.runtime.objects`) and what goes with them."""
_MOST_IN_LOBBY = 2**22
"""A greeting has 16 bytes, rank 0's answer 16 for each rank."""
_OTHERS_LOOK_S = 2.0
"""Twice as long as ranks take from one look for failures to the next (`hvdtrain.runtime.link`)."""
_LENGTHS = "Value-Lengths"
"""Header of an answer that holds several values."""
_KEYS_A_REQUEST = 1000
"""Python's server takes a path of 64 KiB."""


class Store:
    """PUT, GET and DELETE on Horovod's rendezvous store."""

    def __init__(self, address: str, port: int, patience: float = 20.0, most: int = MOST_BYTES) -> None:
        """Ask for ``patience`` seconds, at least one, while the server does not answer.

        Args:
            address: HOROVOD_GLOO_RENDEZVOUS_ADDR: a host, or ``HOST:PORT/TOKEN`` of a store that wants a token.
            port: HOROVOD_GLOO_RENDEZVOUS_PORT.
            patience: seconds.
            most: bytes of a value; a longer one is not read, as if it were not there.
        """
        self._address = address
        self._host, self._path = split_address(address, port)
        self._port = port
        self._patience = patience
        self._most = most

    def with_patience(self, patience: float) -> "Store":
        """Return the same store, asked for so many seconds."""
        return Store(self._address, self._port, patience, self._most)

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Write a value, in place of an earlier one."""
        status, *_ = self._request("PUT", f"/{scope}/{key}", value)
        if status != http.client.OK:
            raise LaunchError(f"Horovod's store at {self} refused to keep {scope}/{key} (HTTP {status}).")

    def get(self, scope: str, key: str, *, wait: int = 0) -> bytes | None:
        """Return a value, or None while it is not written (or is empty).

        Args:
            wait: seconds to wait for it, where the store can do that.
        """
        status, body, _ = self._request("GET", f"/{scope}/{key}", wait=wait)
        return body or None if status == http.client.OK else None

    def get_all(self, scope: str, keys: Sequence[str], *, wait: int = 0) -> dict[str, bytes]:
        """Return those of several values that are written, with one request for many; wait for all of them as `get`."""
        found: dict[str, bytes] = {}
        while keys:
            # The store answers for as many of the first ones as go into a message.
            values = self._values(scope, keys[:_KEYS_A_REQUEST], wait)
            found |= {key: value for key, value in zip(keys, values, strict=False) if value}
            keys, wait = keys[len(values) :], 0
        return found

    def _values(self, scope: str, keys: Sequence[str], wait: int) -> list[bytes]:
        """Return the values of the first one or more of `keys`, empty where none is written."""
        if len(keys) > 1:
            _, body, told = self._request("GET", f"/{scope}/{','.join(keys)}", wait=wait)
            lengths = [int(length) for length in re.findall(r"\d{1,10}", told)]
            if 0 < len(lengths) <= len(keys) and sum(lengths) == len(body):
                return [body[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]
            # Else it is of a Horovod without the patch `read-together`, or one of them is too long.
            wait = 0  # it has waited, or cannot
        return [self.get(scope, key, wait=wait) or b"" for key in keys]

    def delete(self, scope: str, key: str) -> None:
        """Remove a value, where the store can do that."""
        self._request("DELETE", f"/{scope}/{key}")

    def __str__(self) -> str:
        return f"{self._host}:{self._port}"

    def _request(self, method: str, path: str, value: bytes | None = None, *, wait: int = 0) -> tuple[int, bytes, str]:
        """Ask until there is an answer: many ranks at once overrun the queue of a server without `await-values`.

        A body so long that no rank of this job can have written it is not read.

        Returns:
            The status, the body, and the lengths of its values where a store that can was asked for several.

        Raises:
            LaunchError: none came for ``patience`` seconds.
        """
        deadline = time.monotonic() + self._patience
        headers = {"Prefer": f"wait={wait}"} if wait else {}
        while True:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_S)
            try:
                with contextlib.closing(connection):
                    connection.connect()
                    connection.sock.settimeout(max(1.0, self._patience) + wait)
                    connection.request(method, self._path + path, body=value, headers=headers)
                    response = connection.getresponse()
                    too_long = (response.length or 0) > self._most
                    body = b"" if too_long else response.read(self._most)
                    return response.status, body, response.getheader(_LENGTHS, "")
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"Horovod's store at {self} does not answer ({error}). If horovodrun still runs, this host "
                        "cannot reach that address, or has it itself: name an interface by which all hosts reach one "
                        f"another with horovodrun --network-interfaces. This host has {candidates()}."
                    ) from error
                time.sleep(0.02)


def split_address(address: str, port: int) -> tuple[str, str]:
    """Return the host of a store, and what the path of each request to it begins with.

    Args:
        address: HOROVOD_GLOO_RENDEZVOUS_ADDR: a host, or ``HOST:PORT/TOKEN`` of a store that wants a token.
        port: HOROVOD_GLOO_RENDEZVOUS_PORT.
    """
    host, _, token = address.partition("/")
    return host.partition(":")[0], f"/{token}:{port}" if token else ""


class StoreTransport:
    """The values of one scope as messages to rank 0 and back.

    What several ranks have written is read with one request.
    """

    others_may_write = True

    def __init__(
        self, store: Store, scope: str, rank: int, size: int, *, consume: bool = False, kept_here: bool = False
    ) -> None:
        """Speak for ``rank`` of ``size``.

        Args:
            scope: of all values.
            consume: whether rank 0 empties each part it has read, so that a later channel finds none.
            kept_here: whether the store ends with this process.
        """
        # It answers some 1,000 requests a second, and each rank looks with one or two where it cannot wait for a value.
        self.pauses = max(0.001, 0.0005 * size), max(0.05, 0.001 * size)
        self._store = store
        self._scope = scope
        self._rank = rank
        self._size = size
        self._consume = consume
        self._kept_here = kept_here
        self._told = False
        """Whether rank 0 has told in this exchange who is missing."""

    def send(self, sequence: int, message: bytes) -> None:
        # The part of the exchange before was read, as its answer shows.
        self._store.put(self._scope, f"part-{sequence}-{self._rank}", message)
        if sequence > 0:
            self._store.delete(self._scope, f"part-{sequence - 1}-{self._rank}")

    def received(self, sequence: int, ranks: Collection[int], wait: int = 0) -> Iterable[tuple[int, bytes]]:
        parts = self._written(f"part-{sequence}", ranks, self._store, wait)
        for rank in parts if self._consume else ():
            self._store.put(self._scope, f"part-{sequence}-{rank}", b"")
        return parts.items()

    def publish(self, sequence: int, message: bytes, ranks: Collection[int], *, final: bool = True) -> None:
        # One value for all ranks.
        self._store.put(self._scope, f"{'answer' if final else 'state'}-{sequence}", message)
        if not final:
            self._told = True
            # One of an earlier channel, or forged, would keep the others from looking further.
            self._store.put(self._scope, f"answer-{sequence}", b"")

    def published(self, sequence: int, wait: int = 0) -> bytes | None:
        answer = self._store.get(self._scope, f"answer-{sequence}", wait=wait)
        return answer or self._store.get(self._scope, f"state-{sequence}")

    def finish(self, sequence: int, deadline: float) -> None:
        # All have read the answer before, or they would not have sent a part.
        if sequence > 0:
            self._store.delete(self._scope, f"answer-{sequence - 1}")
        if self._told:
            self._store.delete(self._scope, f"state-{sequence}")
            self._told = False

    def send_failure(self, message: bytes) -> None:
        # One value tells that there are any, so that a look is one request.
        store = self._store.with_patience(1.0)
        store.put(self._scope, f"failure-{self._rank}", message)
        store.put(self._scope, "failed", str(self._rank).encode())

    def received_failures(self, known: Collection[int]) -> dict[int, bytes]:
        store = self._store.with_patience(0.0)
        if store.get(self._scope, "failed") is None:
            return {}
        return self._written("failure", [rank for rank in self._others() if rank not in known], store)

    def post(self, message: bytes) -> None:
        self._store.with_patience(1.0).put(self._scope, f"board-{self._rank}", message)

    def posted(self) -> dict[int, bytes]:
        return self._written("board", self._others(), self._store.with_patience(1.0))

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _written(self, name: str, ranks: Collection[int], store: Store, wait: int = 0) -> dict[int, bytes]:
        """Return what those of `ranks` that have written `name` wrote; wait as `Store.get`."""
        keys = {f"{name}-{rank}": rank for rank in ranks}
        return {keys[key]: value for key, value in store.get_all(self._scope, list(keys), wait=wait).items()}

    def abort(self, code: int) -> NoReturn:
        """End this process: horovodrun ends the others of a job where one ends with an error.

        Where no horovodrun does, they end by themselves once they have read why, and the store waits for that.
        """
        if self._kept_here:
            time.sleep(max(_OTHERS_LOOK_S, 2 * self._size / 500))  # they look less often in a large job
        end_process(code or 1)

    def close(self) -> None:
        """Do nothing: no connection is held, and the store ends with horovodrun or rank 0."""


def open_store(environment: Environment, *, timeout: float, environ: Mapping[str, str] = os.environ) -> RootedChannel:
    """Open the channel over the store whose address horovodrun, or the ranks' meeting, put into the environment.

    Every rank contributes a random number to the session's name, which all later signatures cover: messages
    of another job, or of an earlier channel of this one, do not fit. Without the secret the name cannot be
    found, and the store lists none: nobody else can read what the ranks write, or replace it.

    Raises:
        LaunchError: a rank is missing, the secrets differ, or the store does not answer.
    """
    address, port = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    rank, size, job = environment.rank, environment.size, environment.job_id
    given = secret_from_environment(environ) or environ.get(LAUNCHER_SECRET_VARIABLE, "").encode()
    secret = given or secret_from_key_file(environment.job_id, environ)
    in_lobby, scope = Store(address, port, most=_MOST_IN_LOBBY), "hvdtrain-lobby"
    lobby = StoreTransport(in_lobby, scope, rank, size, consume=True)
    greeting = RootedChannel(lobby, Signer(secret, job), rank, size)
    numbers = greeting.greet(secrets.token_bytes(16), timeout=timeout)
    in_lobby.put(scope, f"part-0-{rank}", b"")  # it may have been sent once more after rank 0 had read it
    session = hmac.digest(secret, b"session\0" + b"".join(numbers), "sha256").hex()[:32]
    kept_here = environment.store_on_rank_0 and rank == 0
    room = StoreTransport(Store(address, port), f"hvdtrain-{session}", rank, size, kept_here=kept_here)
    return RootedChannel(room, Signer(secret, f"{job} {session}"), rank, size)
