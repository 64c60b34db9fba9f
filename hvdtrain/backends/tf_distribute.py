"""Backends for tf.distribute strategies: several replicas per process, or one per worker."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Among, Capabilities, Collectives, ReduceOp
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.compat.keras_variables import disable_gradient_sums
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.runtime.session import Session
from hvdtrain.runtime.strategies import OpenStrategy


class StrategyBackend:
    """Data-parallel training over a strategy's replicas, by hvdtrain's own loop.

    A process with several replicas reads the whole global batch; each replica slices its share within the compiled
    step.
    """

    capabilities = Capabilities(
        sends_together=True,
        needs_builders=True,
    )
    roles: Mapping[str, int] = {}
    axes: Mapping[str, int] = {}
    sends = True
    by_host = None
    remarks: Sequence[str] = ()

    def __init__(self, session: Session, opened: OpenStrategy) -> None:
        self.session = session
        self._strategy = opened.strategy
        self.name = opened.name
        self.transport = opened.transport
        self.size = int(opened.strategy.num_replicas_in_sync)
        self.data_parallel = self
        self.process = session.environment.rank
        self.processes = session.environment.size
        self.rank = self.process
        self.job_size = self.processes
        self.primary = session.world.primary
        self.local_size = self.size // self.processes

    @property
    def index(self) -> int:
        """Replica index in its context; outside that of the process's first replica."""
        if not self._is_replica():
            return self.process * self.local_size
        return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))

    def scope(self) -> AbstractContextManager[Any]:
        return self._strategy.scope()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step` on each replica of this process; return the first one's results."""
        results = self._strategy.run(step, args=args)
        return tf.nest.map_structure(lambda result: self._strategy.experimental_local_results(result)[0], results)

    def prepare(self, optimizer: Any) -> None:
        """Disable Keras' own gradient sum, which would count gradients n times."""
        while optimizer is not None:
            disable_gradient_sums(optimizer)
            optimizer = getattr(optimizer, "inner_optimizer", None)

    def _is_replica(self) -> bool:
        """Return whether this code runs as one of the replicas."""
        context = tf.distribute.get_replica_context()
        return context is not None and context.strategy is self._strategy

    def _context(self, name: str) -> Any:
        """Return the replica context that `name` is reduced in."""
        if not self._is_replica():
            raise ConfigError(
                f"{opt('backend', self.name)} exchanges tensors only within its replicas, which Trainer runs: {name!r} "
                "was "
                f"to be exchanged outside of them. In a loop of your own use {opt('backend', 'horovod')}."
            )
        return tf.distribute.get_replica_context()

    def all_reduce(
        self, tensor: tf.Tensor, *, name: str, op: ReduceOp = "sum", prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Reduce over the replicas. Raises ConfigError for Adasum."""
        if op == "adasum":
            raise ConfigError(f"{opt('reduce_op', op)} is Horovod's: {opt('backend', self.name)} cannot do it.")
        if op in _OF_ALL:
            each = self.all_gather(_times(tensor, prescale)[None], name=name)
            return _times(_OF_ALL[op](each, axis=0), postscale)
        after = postscale / self.size if op == "average" else postscale
        total = self._context(name).all_reduce(tf.distribute.ReduceOp.SUM, _times(tensor, prescale))
        return _times(total, after)

    def grouped_all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Sum over the replicas in one batch."""
        scaled = [_times(tensor, prescale) for tensor in tensors]
        totals = self._context(name).all_reduce(tf.distribute.ReduceOp.SUM, scaled)
        return [_times(total, postscale) for total in totals]

    def reduce_scatter(
        self, tensor: tf.Tensor, *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Refuse: tf.distribute has no reduce-scatter on every device. Always raises ConfigError."""
        raise ConfigError(f"tf.distribute has no reduce-scatter: {opt('backend', self.name)} cannot exchange {name!r}.")

    def grouped_reduce_scatter(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Refuse, like `reduce_scatter`."""
        return [self.reduce_scatter(each, name=name) for each in tensors]

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        # Tensors from outside of the replica have no device yet.
        return self._context(name).all_gather(tf.identity(tensor), axis=0)

    def grouped_all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return [self.all_gather(each, name=name) for each in tensors]

    def all_to_all(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Refuse: tf.distribute has no all-to-all. Always raises ConfigError."""
        raise ConfigError(f"tf.distribute has no all-to-all: {opt('backend', self.name)} cannot exchange {name!r}.")

    def exchange_rows(self, tensor: tf.Tensor, rows: tf.Tensor, *, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Refuse, as `all_to_all` does."""
        return self.all_to_all(tensor, name=name), rows

    def broadcast_value(self, tensor: tf.Tensor, *, root: int, name: str) -> tf.Tensor:
        """Refuse: replicas of tf.distribute have no broadcast of their own.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"tf.distribute has no broadcast of tensors: {opt('backend', self.name)} cannot exchange {name!r}. "
            "Broadcast variables with hvdtrain.broadcast_variables."
        )

    @property
    def everyone(self) -> Collectives:
        return self

    def along(self, *axes: str) -> Collectives:
        return NoOpCollectives()

    def between(self, axis: str, here: int, there: int) -> Collectives:
        return NoOpCollectives()

    def broadcast(self, tensors: Mapping[str, tf.Variable], *, root: int = 0, among: Among = "replicas") -> None:
        """Assign `root`'s values on every worker; replicas of one process always agree. Collective."""
        if self.processes == 1:
            return

        def values() -> dict[str, tf.Tensor]:
            return {path: self._from(root, variable.read_value(), path) for path, variable in tensors.items()}

        found = tf.function(lambda: self.run(values), autograph=False).get_concrete_function()()
        for path, variable in tensors.items():
            variable.assign(found[path])

    def _from(self, root: int, value: tf.Tensor, path: str) -> tf.Tensor:
        """Broadcast as a sum in which all other replicas contribute zeros."""
        known = value.dtype in _SUMMABLE
        mine = value if known else tf.cast(value, tf.int64)
        total = self.all_reduce(mine if self.index == root else tf.zeros_like(mine), name=f"broadcast/{path}")
        return total if known else tf.cast(total, value.dtype)

    def gather_bytes(self, payload: bytes, *, timeout: float | None, among: Among = "job") -> list[bytes]:
        return self.session.gather(payload, timeout)

    def close(self) -> None:
        self.session.close()


_SUMMABLE = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
"""Dtypes that collectives sum on every device; other integers and booleans are sent as int64."""


_OF_ALL: Mapping[ReduceOp, Callable[..., tf.Tensor]] = {
    "min": tf.reduce_min,
    "max": tf.reduce_max,
    "product": tf.reduce_prod,
}
"""Reductions that strategies do not have, by what the replicas gather."""


def _times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    return tensor if factor == 1.0 else tensor * factor
