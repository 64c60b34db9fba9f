"""tf.distribute's ParameterServerStrategy: workers that change parameters on servers, each at its own pace."""

import re
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Capabilities
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.compat.keras_variables import disable_gradient_sums
from hvdtrain.config.errors import ConfigError, LaunchError, opt
from hvdtrain.config.training import BadStepConfig, ExchangeConfig, UpdateConfig
from hvdtrain.runtime.parameter_server import SERVER, WORKER, Roles
from hvdtrain.runtime.session import Session
from hvdtrain.runtime.strategies import OpenStrategy

WAITING_PER_WORKER = 4
"""Calls that wait for each worker, with their batches in the chief's memory: a slow one does not stop the others."""


class ParameterServerBackend(NoOpCollectives):
    """Asynchronous training, as the chief sees it: it reads the data, and has each step taken by one of the workers.

    Variables that are made within `scope` lie on the parameter servers.
    """

    # A worker exchanges nothing, and of what a compiled function may call it has the model's variables only by way of
    # their servers: XLA could not reach them, and sums and random states of its own would lie on the chief.
    capabilities = Capabilities(
        lacks=(
            *(option.name for part in (ExchangeConfig, UpdateConfig, BadStepConfig) for option in fields(part)),
            *("sync_batch_norm", "accumulate", "jit", "recompute", "desync_every"),
        ),
        sends_together=True,
        needs_builders=True,
        asynchronous=True,
        step_factory="hvdtrain.training.asynchronous.step_factory:AsynchronousStepFactory",
    )

    def __init__(self, session: Session, opened: OpenStrategy) -> None:
        assert opened.roles is not None, "somebody leads"
        self._session = session
        self._strategy = opened.strategy
        self.name = opened.name
        self.roles = {"chief": 1, "worker": opened.roles.workers, "parameter server": opened.roles.servers}
        self.workers = CoordinatedWorkers(opened.strategy, opened.roles)

    def scope(self) -> AbstractContextManager[Any]:
        """Return the scope in which variables are made on the parameter servers."""
        return self._strategy.scope()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step` as a worker's replica; within a function of the chief's own as it is.

        In this thread: `Strategy.run` would have optimizers apply gradients in another one, which sees nothing of the
        contexts that `step` has opened.
        """
        if tf.distribute.get_strategy() is not self._strategy:
            return step(*args)
        with tf.distribute.ReplicaContext(self._strategy, 0):
            return step(*args)

    def prepare(self, optimizer: Any) -> None:
        """Keep it from adding gradients up, which there is no need to.

        Raises:
            ConfigError: it changes the scale of the loss by itself.
        """
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ConfigError(
                f"Dynamic loss scaling is not for {opt('backend', self.name)}, whose workers would change the scale "
                "while "
                f"others have yet to divide by it: use {opt('precision', 'mixed_bfloat16')}."
            )
        disable_gradient_sums(optimizer)

    def close(self) -> None:
        """Let the servers go and end the session."""
        self._session.close()


class CoordinatedWorkers:
    """The workers, through tf.distribute's ClusterCoordinator; see `Workers`."""

    def __init__(self, strategy: Any, roles: Roles) -> None:
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._roles = roles
        self._waiting: deque[_Result] = deque()

    @property
    def count(self) -> int:
        """See `Workers`."""
        return self._roles.workers

    def schedule(self, function: Callable[..., Any], *args: Any) -> "_Result":
        """See `Workers`."""
        while len(self._waiting) >= WAITING_PER_WORKER * self.count:
            self._waiting.popleft().fetch()
        result = _Result(self._coordinator, self._coordinator.schedule(function, args=args), self._roles)
        self._waiting.append(result)
        return result

    def join(self) -> None:
        """See `Workers`."""
        waiting, self._waiting = self._waiting, deque()
        for result in waiting:
            result.fetch()


class _Result:
    """See `Future`."""

    def __init__(self, coordinator: Any, value: Any, roles: Roles) -> None:
        self._coordinator = coordinator
        self._value = value
        self._roles = roles

    def fetch(self) -> Any:
        """See `Future`.

        Raises:
            LaunchError: a process is gone.
            tf.errors.OpError: this call failed, or another one, with which all that were waiting were given up.
        """
        try:
            return self._value.fetch()
        except tf.errors.OpError as error:
            cause = self._first_error() or error
            if isinstance(cause, tf.errors.UnavailableError):
                raise LaunchError(
                    f"{opt('backend', 'parameter_server')} lost {lost_process(str(cause.message), self._roles)}: its "
                    "process has "
                    "ended, or cannot be reached."
                ) from cause
            raise cause from None

    def _first_error(self) -> tf.errors.OpError | None:
        """Take the error that ended the calls from the coordinator, which would raise it at the next one."""
        try:
            self._coordinator.join()
        except tf.errors.OpError as error:
            return error
        return None


def lost_process(message: str, roles: Roles) -> str:
    """Say which process an error of TensorFlow's is about: a server that a worker misses, else the worker."""
    for kind, name in {SERVER: "parameter server", WORKER: "worker"}.items():
        found = re.search(rf"/job:{kind}/replica:\d+/task:(\d+)", message)
        if found:
            index = int(found[1])
            return f"{name} {index} (rank {roles.tasks.index((kind, index))})"
    return "one of its processes"
