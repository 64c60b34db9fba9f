"""Serve a job's store in a process beside rank 0: it answers while rank 0 computes, or is stopped.

    python -m hvdtrain.runtime.store_server < order

Its first line of input says what to serve, its first line of output on which port. It ends with rank 0: at the end
of its input or, where a child of rank 0 holds that open, when it has another parent.

A rank knows the store of its job before it sends the token: the store signs a number that the rank draws. Somebody else
may listen on the port. What he is sent is of no use to him, and what he answers does not pass.
"""

import contextlib
import hmac
import http.client
import json
import os
import re
import select
import signal
import socketserver
import sys
from typing import Any

from hvdtrain.compat.horovod import stored_value

_PATH = re.compile(r"/hello/([0-9a-f]{32})")
STATE = ("rendezvous", "state")
"""Scope and key of the store under which rank 0 notes that all ranks have come."""
COMPLETE = b"complete"


def path_of(nonce: str) -> str:
    """Return the path under which the store signs `nonce`, 32 hexadecimal digits."""
    return f"/hello/{nonce}"


def answer(key: bytes, port: int, nonce: str) -> bytes:
    """Return the signed answer of the store that listens on `port`: it does not pass for that of another port."""
    return hmac.digest(key, json.dumps(["hello", port, nonce]).encode(), "sha256").hex().encode()


_LOOK_S = 0.5
_QUEUE = 1024
"""Connections that wait to be accepted: all ranks call at once."""


def main() -> int:
    """Serve until rank 0 is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for rank 0, which tells this process itself when to end
    order, parent = json.loads(sys.stdin.buffer.readline()), os.getppid()
    try:
        server = start(order["address"], order["ports"], order["token"], bytes.fromhex(order["key"]))
    except OSError as error:
        _say({"error": error.strerror or str(error)})
        return 1
    _say({"port": server.server_address[1]})
    while os.getppid() == parent and not _has_ended(sys.stdin.buffer.fileno()):
        pass
    return 0


def start(address: str, ports: list[int], token: str, key: bytes) -> Any:
    """Return a server that answers on the first free one of `ports`, on threads of its own.

    Args:
        address: where it listens; "" for all addresses of this machine.
        ports: candidates.
        token: required at the start of each request.
        key: with which it signs its answer to ranks that look for it, as long as the ranks gather.

    Raises:
        OSError: none of the ports is free, or `address` is not one of this machine.
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    from horovod.runner.util.threads import in_thread

    class Handler(RendezvousHandler):
        def refusal(self) -> int | None:
            return None if self._nonce() else super().refusal()

        def do_GET(self) -> None:
            nonce = self._nonce()
            if nonce is None:
                super().do_GET()
            elif stored_value(self, *STATE) == COMPLETE:
                self.send_status_code(http.client.CONFLICT)
            else:
                body = answer(key, self.server.server_address[1], nonce)
                self.send_response(http.client.OK)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def _nonce(self) -> str | None:
            match = _PATH.fullmatch(self.path) if self.command == "GET" else None
            return match and match[1]

    class Server(RendezvousHTTPServer):
        request_queue_size = _QUEUE
        daemon_threads = True

        def server_bind(self) -> None:
            socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks the network for this machine's name
            self.server_name, self.server_port = self.server_address[:2]

    failure = OSError("no port to listen on")
    for port in ports:
        try:
            server = Server((address, port), Handler, 0, token)
        except OSError as error:
            failure = error
            continue
        in_thread(target=server.serve_forever)
        return server
    raise failure


def _has_ended(descriptor: int) -> bool:
    """Wait a little, and return whether the input has ended."""
    readable, _, _ = select.select([descriptor], [], [], _LOOK_S)
    return bool(readable) and not os.read(descriptor, 1)


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
