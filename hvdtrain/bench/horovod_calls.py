"""Horovod's collectives, by its own functions, called eagerly."""

from collections.abc import Callable
from typing import Any

from hvdtrain.bench.calls import Floats
from hvdtrain.bench.timing import process_settings
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.link import Link
from hvdtrain.runtime.session import open_session


def open_engine(link: Link) -> "HorovodCalls":
    """Initialize Horovod with hvdtrain's settings of the exchange."""
    return HorovodCalls(link)


class HorovodCalls:
    """See `Caller`."""

    def __init__(self, link: Link) -> None:
        self._session = open_session(link, RuntimeConfig(backend="horovod"))
        import horovod.tensorflow as hvd
        import tensorflow as tf

        self._hvd, self._tf = hvd, tf
        self._one = tf.ones([1])
        self.settings = process_settings(self._session.plan.threads)

    def prepared(self, collective: str, values: Floats) -> Callable[[], Any]:
        """See `Caller`."""
        hvd, tensor = self._hvd, self._tf.constant(values)
        known: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: hvd.allreduce(tensor, op=hvd.Sum),
            "allgather": lambda: hvd.allgather(tensor),
            "reducescatter": lambda: hvd.reducescatter(tensor, op=hvd.Sum),
            "alltoall": lambda: hvd.alltoall(tensor),
            "broadcast": lambda: hvd.broadcast(tensor, 0),
        }
        return known[collective]

    def meet(self) -> None:
        """See `Caller`."""
        self._hvd.allreduce(self._one, op=self._hvd.Sum)

    def close(self) -> None:
        """See `Caller`."""
        self._hvd.shutdown()
