"""Which services the ranks of a job use."""

import json
import socket
from collections.abc import Iterator, Sequence

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError, DataError, opt
from hvdtrain.data.batch import Batch
from hvdtrain.data.service.processes import check_address, start_local, watch
from hvdtrain.runtime.control.channel import end_process
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.session import current, has_session

PYTHON = (
    f"{opt('data_service')} runs no Python code of this process, and the data call some for their samples "
    "(py_function, numpy_function, from_generator, --shard-by files, or a source that reads in Python). Leave "
    f"{opt('data_service')} out, or use TensorFlow's own operations."
)


def open_service(option: str, workers: int, backend: Backend) -> tuple[str, ...]:
    """Start the services of this host, or reach those that are named; every rank calls it.

    Args:
        option: `local`, or addresses grpc://HOST:PORT, separated by commas.
        workers: processes of `local` on each host.
        backend: the replicas.

    Raises:
        ConfigError: something else.
        DataError: a service cannot be started or reached.
    """
    addresses = _local(workers, backend) if option == "local" else addresses_in(option)
    for address in addresses:
        check_address(address)
    watch(addresses, _end_job)
    return tuple(addresses)


def addresses_in(option: str) -> list[str]:
    """Return the addresses in `grpc://HOST:PORT,grpc://HOST:PORT`.

    Raises:
        ConfigError: it is something else.
    """
    addresses = option.split(",")
    for address in addresses:
        host, _, port = address.removeprefix("grpc://").rpartition(":")
        if not (address.startswith("grpc://") and host and port.isdigit()):
            raise ConfigError(
                f"{opt('data_service')} is local, or grpc://HOST:PORT, several separated by commas. Received: "
                f"{option!r}."
            )
    return addresses


def _local(workers: int, backend: Backend) -> list[str]:
    """Start the services of this host on its first rank, and return their addresses on all of its ranks."""
    first, host = detect_environment().local_rank == 0, socket.gethostname()
    started = start_local(workers) if first else []
    payload = json.dumps([host, started]).encode()
    everyone: Sequence[list[str]] = [json.loads(text) for text in backend.gather_bytes(payload, timeout=None)]
    return [address for name, addresses in everyone if name == host for address in addresses]


def refuse_python(batches: Iterator[Batch]) -> None:
    """Read the first of `batches` that a service makes.

    Raises:
        ConfigError: it calls Python code of this process.
    """
    try:
        next(batches)
    except tf.errors.OpError as error:
        if "pyfunc" in str(error).lower():
            raise ConfigError(PYTHON) from error
        raise


class Services:
    """The services that a trainer has opened, so that a second training uses them again."""

    def __init__(self) -> None:
        self._opened: dict[str, tuple[str, ...]] = {}

    def open(self, option: str, backend: Backend) -> tuple[str, ...]:
        """Return the addresses of `option`; every rank calls it."""
        if option not in self._opened:
            self._opened[option] = open_service(option, 1, backend)
        return self._opened[option]


def _end_job(error: DataError) -> None:
    """End this rank, and with it the job: its main thread waits in TensorFlow."""
    end_process(current().link.fail(error) if has_session() else 1)
