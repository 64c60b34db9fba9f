"""The program of the ranks that serve data, as `horovod.tensorflow.data.compute_worker`.

Start it with `horovodrun -np N python -m hvdtrain.horovod.data.compute_worker CONFIG_FILE`.
"""

import argparse
from collections.abc import Sequence

from horovod.runner.common.service.compute_service import ComputeService
from horovod.runner.common.util import secret

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import init
from hvdtrain.horovod.data.compute_service import TfDataServiceConfig, compute_worker_fn
from hvdtrain.horovod.functions import broadcast_object
from hvdtrain.horovod.names import rank, size

__all__ = ["ComputeService", "TfDataServiceConfig", "compute_worker_fn", "main"]

_SIDES = ("compute", "training")


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Serve data until a training job shuts the service down.

    Args:
        dispatchers: number of dispatchers; the number of ranks must be a multiple of it.
        dispatcher_side: who runs them: "compute", these ranks, or "training", the training job.
        configfile: file that rank 0 writes, by which training jobs find the service.
        timeout: seconds to wait for dispatchers and workers to register.

    Raises:
        ConfigError: a value that cannot work.
    """
    if dispatcher_side not in _SIDES:
        raise ConfigError(f"dispatcher_side must be compute or training. Received: {dispatcher_side!r}.")
    init()
    if dispatchers < 1 or size() % dispatchers:
        raise ConfigError(
            f"Number of processes ({size()}) must be a multiple of number of dispatchers ({dispatchers})."
        )
    per_dispatcher, key = size() // dispatchers, secret.make_secret_key()
    service = ComputeService(dispatchers, per_dispatcher, key=key) if rank() == 0 else None
    config = None
    try:
        if service is not None:
            config = TfDataServiceConfig(
                dispatchers, per_dispatcher, dispatcher_side, service.addresses(), key, timeout
            )
            config.write(configfile)
        compute_worker_fn(broadcast_object(config, name="TfDataServiceConfig"))
    finally:
        if service is not None:
            service.shutdown()


def _arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hvdtrain.horovod.data.compute_worker", description=main.__doc__)
    parser.add_argument("configfile", help="file that rank 0 writes, by which training jobs find the service")
    parser.add_argument("--dispatchers", default=1, type=int, help="number of dispatchers")
    parser.add_argument("--dispatcher-side", default="compute", choices=_SIDES, help="who runs the dispatchers")
    parser.add_argument("--timeout", default=60, type=int, help="seconds to wait for dispatchers and workers")
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments = _arguments()
    main(arguments.dispatchers, arguments.dispatcher_side, arguments.configfile, arguments.timeout)
