"""`data serve`: a process of tf.data service that reads and decodes for the ranks of a job."""

import argparse
import socket
import threading

from hvdtrain.cli.local import import_tensorflow_for_cpu, run_here


def main(argv: list[str]) -> int:
    """Serve until it is interrupted, and return the exit code."""
    return run_here(lambda: _parsed(argv), _serve)


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m hvdtrain data serve",
        description="Serves a job that is started with --data-service grpc://HOST:PORT, until it is interrupted. "
        "It reads files by the paths that the ranks use, and trusts whoever reaches its port.",
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: the system chooses)")
    parser.add_argument("--host", default=socket.gethostname(), help="name by which ranks reach this machine")
    return parser.parse_args(argv)


def _serve(words: argparse.Namespace) -> int:
    import_tensorflow_for_cpu()
    from hvdtrain.data.service.server import start

    servers, address = start(words.port, words.host)
    print(f"{address}  (--data-service {address})", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return 0 if servers else 1
    return 0
