"""Horovod's rendezvous store, for the ranks of its job alone.

The store itself asks nobody who they are. Here the address that the ranks get ends with a random token,
`HOST:PORT/TOKEN`. Whoever asks for a key puts `http://` in front and `:PORT/scope/key` behind, Horovod's C++ core, its
Python client and `hvdtrain.runtime.control.store` alike, so that the token begins the path of each of their requests.
A request without it is refused before its body is read.
"""

import contextlib
import hmac
import http.client
from collections.abc import Iterator
from typing import Any

from hvdtrain.runtime.control.store import MOST_BYTES
from hvdtrain.runtime.horovodrun.replaced import replaced

_METHODS = ("GET", "PUT", "DELETE")
"""The handler would also answer HEAD, for files in the folder in which horovodrun was started."""


@contextlib.contextmanager
def guarded_store(gloo_run: Any, token: str) -> Iterator[None]:
    """Have Horovod's module `gloo_run` start a rendezvous server that wants `token`, and listens on one address.

    Args:
        gloo_run: `horovod.runner.gloo_run`.
        token: letters and digits that nobody else knows.
    """
    server_class = guarded_server(token)
    launch, launch_elastic = gloo_run.launch_gloo, gloo_run.launch_gloo_elastic

    def launch_gloo(command: Any, exec_command: Any, settings: Any, nics: Any, env: Any, server_ip: str) -> Any:
        with replaced(gloo_run, RendezvousServer=lambda verbose: server_class(verbose, server_ip)):
            return launch(command, exec_command, settings, nics, env, server_ip)

    def launch_gloo_elastic(*args: Any) -> Any:
        settings, server = args[2], args[5]
        if settings.nics:  # else the interfaces are found while the server runs
            server.host = gloo_run.network.get_driver_ip(settings.nics)
        return launch_elastic(*args)

    with replaced(
        gloo_run, RendezvousServer=server_class, launch_gloo=launch_gloo, launch_gloo_elastic=launch_gloo_elastic
    ):
        yield


def address_with_token(host: str, port: int, token: str) -> str:
    """Return the HOROVOD_GLOO_RENDEZVOUS_ADDR by which ranks reach a guarded store."""
    return f"{host}:{port}/{token}"


def guarded_server(token: str) -> type[Any]:
    """Return Horovod's RendezvousServer, which answers those who know `token`."""
    from horovod.runner.http import http_server

    class GuardedServer(http_server.RendezvousServer):
        def __init__(self, verbose: int = 0, host: str = "") -> None:
            super().__init__(verbose)
            self.host = host
            """Where it listens; all addresses by default."""

        def start(self, handler_cls: type[Any] = http_server.RendezvousHandler) -> int:
            handler = guarded_handler(handler_cls, token)
            self._httpd, port = http_server.find_port(
                lambda address: http_server.RendezvousHTTPServer((self.host, address[1]), handler, self._verbose)
            )
            self._listen_thread = http_server.in_thread(target=self._httpd.serve_forever)
            return int(port)

    return GuardedServer


def guarded_handler(handler_class: type[Any], token: str) -> type[Any]:
    """Return a handler that refuses requests without the token, of other methods, and too large ones."""

    class GuardedHandler(handler_class):
        path: str

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            status = self._refusal()
            if status is not None:
                self.close_connection = True
                self.send_status_code(status)
            return status is None

        def _refusal(self) -> int | None:
            """Return why the request is refused, and take the token off its path if it is not."""
            begin = f"/{token}:{self.server.server_address[1]}/"
            if not hmac.compare_digest(self.path[: len(begin)].encode(), begin.encode()):
                return http.client.FORBIDDEN
            self.path = self.path[len(begin) - 1 :]
            length = self.headers.get("Content-Length", "0")
            if self.command not in _METHODS or self.path.count("/") != 2 or not length.isdecimal():
                return http.client.BAD_REQUEST
            return http.client.REQUEST_ENTITY_TOO_LARGE if int(length) > MOST_BYTES else None

    return GuardedHandler
