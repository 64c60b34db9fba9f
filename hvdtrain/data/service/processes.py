"""The processes of tf.data service that a rank uses: started, reached and watched."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from hvdtrain.config.errors import DataError, opt
from hvdtrain.data.service.served import distributed
from hvdtrain.runtime.inherited import without_launcher

START_TIMEOUT_S = 120.0
REACH_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 60.0
"""A dataset takes a tenth of a second on an idle machine; on a busy one with few cores it has taken more than 10."""
WATCH_EVERY_S = 2.0
MISSED = 3
"""Looks in a row that find nobody before a service counts as lost."""


def start_local(count: int) -> list[str]:
    """Start `count` services as children of this process and return their addresses.

    Raises:
        DataError: one does not start; shows the end of what it wrote.
    """
    words = [sys.executable, "-m", "hvdtrain.data.service.server"]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    children = [
        subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**without_launcher(os.environ), **hidden},
        )
        for _ in range(count)
    ]
    return [_address_of(child) for child in children]


def _address_of(child: "subprocess.Popen[bytes]") -> str:
    assert child.stdout is not None
    assert child.stderr is not None
    timer = threading.Timer(START_TIMEOUT_S, child.kill)
    timer.start()
    line = child.stdout.readline().decode().strip()
    timer.cancel()
    if not line.startswith("grpc://"):
        said = child.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        raise DataError(
            f"{opt('data_service', 'local')}: its process did not start: {' '.join(said) or 'it said nothing'}."
        )
    threading.Thread(target=_outlast, args=(child,), daemon=True).start()
    return line


def _outlast(child: "subprocess.Popen[bytes]") -> None:
    """Read what `child` writes until it ends: a full pipe would stop it, and so would its input, once collected."""
    assert child.stderr is not None
    child.stderr.read()
    child.wait()


def check_address(address: str, timeout: float = REACH_TIMEOUT_S, answer_timeout: float = ANSWER_TIMEOUT_S) -> None:
    """Refuse a service that cannot be reached, or has not one worker.

    Args:
        address: `grpc://HOST:PORT`.
        timeout: seconds to wait for a connection.
        answer_timeout: seconds to wait for a dataset's elements.

    Raises:
        DataError: names the address.
    """
    if not reachable(address, timeout):
        raise DataError(
            f"The service {address} cannot be reached within {timeout:g} s. Start it there with "
            f"`python -m hvdtrain data serve`, or use {opt('data_service', 'local')}."
        )
    found: list[int] = []
    probe = threading.Thread(target=lambda: found.append(_workers(address)), daemon=True)
    probe.start()
    probe.join(answer_timeout)
    if found != [1]:
        said = f"{found[0]} workers" if found else f"no answer within {answer_timeout:g} s"
        raise DataError(
            f"The service {address} must be a tf.data service with one worker, which keeps the order of samples. "
            f"Received: {said}. Start several with `python -m hvdtrain data serve`, and name all of them."
        )


def _workers(address: str) -> int:
    """Count the workers: without sharding each gives the whole dataset."""
    return sum(1 for _ in distributed(tf.data.Dataset.range(1), address))


def reachable(address: str, timeout: float) -> bool:
    """Whether something listens at `grpc://HOST:PORT`."""
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout):
            return True
    except OSError:
        return False


def watch(addresses: Sequence[str], lost: Callable[[DataError], None]) -> None:
    """Call `lost` in a thread when one of `addresses` is gone: TensorFlow would wait for it for ever."""

    def look() -> None:
        missed = dict.fromkeys(addresses, 0)
        while True:
            time.sleep(WATCH_EVERY_S)
            for address in addresses:
                missed[address] = 0 if reachable(address, WATCH_EVERY_S) else missed[address] + 1
                if missed[address] >= MISSED:
                    lost(DataError(f"The data service {address} has ended: samples can be read no more."))
                    return

    threading.Thread(target=look, daemon=True, name="data-service").start()
