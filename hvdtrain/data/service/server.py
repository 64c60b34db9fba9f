"""A process of tf.data service: a dispatcher with one worker, which ends with the process that started it.

Usage: python -m hvdtrain.data.service.server, with a pipe as its input. It prints the address and works until the pipe
is closed, also where the other end was killed.
"""

import os
import sys
from typing import Any


def start(port: int = 0, host: str = "localhost") -> tuple[Any, str]:
    """Start a dispatcher and its worker; return what keeps them alive, and the address.

    Args:
        port: of the dispatcher; 0 lets the system choose.
        host: the name by which ranks reach this machine.
    """
    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))
    local = dispatcher.target.removeprefix("grpc://")
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=local, worker_address=f"{host}:%port%"))
    return (dispatcher, worker), f"grpc://{host}:{local.rpartition(':')[2]}"


def main() -> None:
    """Serve until the input is closed."""
    servers, address = start()
    print(address, flush=True)
    sys.stdin.buffer.read()
    # At once: TensorFlow's servers would wait for clients that may be gone.
    os._exit(0 if servers else 1)


if __name__ == "__main__":
    main()
