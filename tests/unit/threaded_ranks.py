"""Threads that stand for the ranks of a job, over the rendezvous store that horovodrun would keep."""

import functools
import http.client
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.launchers import SECRET_VARIABLE, Environment, detect_environment
from hvdtrain.runtime.link import open_control


def start_server() -> tuple[Any, int]:
    """Start Horovod's rendezvous server in this process; return it and its port."""
    http_server = pytest.importorskip("horovod.runner.http.http_server", reason="Horovod is not installed")
    server = http_server.RendezvousServer()
    return server, server.start()


# Stopping one takes half a second.
_the_server = functools.cache(start_server)


def rendezvous() -> int:
    """Return the port of a rendezvous server that holds nothing."""
    server, port = _the_server()
    server.init([])
    return port


def variables(rank: int, size: int, port: int, **more: str) -> dict[str, str]:
    """Return what horovodrun sets on one host, and a secret."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "CROSS_RANK": 0}
    sizes = {"SIZE": size, "LOCAL_SIZE": size, "CROSS_SIZE": 1, "GLOO_RENDEZVOUS_PORT": port}
    numbers = {f"HOROVOD_{name}": str(value) for name, value in (place | sizes).items()}
    return numbers | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", SECRET_VARIABLE: "of the test"} | more


def place(rank: int, size: int) -> Environment:
    return replace(detect_environment({}), rank=rank, size=size, hostname=f"host{rank}")


def on_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Run ``body(rank)`` on a thread for each rank; return what each returned or raised."""
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = body(rank)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=90)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return outcomes


def as_ranks(size: int, body: Callable[[ControlChannel], Any], **more: str) -> list[Any]:
    """Run ``body(channel)`` as each of ``size`` ranks; return what each returned or raised."""
    port = rendezvous()

    return on_threads(size, lambda rank: body(open_rank(rank, size, port, **more)))


def open_rank(rank: int, size: int, port: int, *, timeout: float = 10.0, **more: str) -> ControlChannel:
    """Open the channel of a rank over the store at `port`, with `more` variables."""
    environ = variables(rank, size, port, **more)
    return open_control(detect_environment(environ), timeout=timeout, environ=environ)


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Return the status and the body of a plain request to the store at `port`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, path, body=body)
    answer = connection.getresponse()
    return answer.status, answer.read()
