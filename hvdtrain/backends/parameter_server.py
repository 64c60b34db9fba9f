"""Backend for tf.distribute's ParameterServerStrategy: asynchronous workers update shared parameters."""

import re
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Capabilities
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.compat.keras_variables import disable_gradient_sums
from hvdtrain.config.errors import LaunchError, opt
from hvdtrain.runtime.session import Session
from hvdtrain.runtime.strategies import SERVER, WORKER, OpenStrategy, Roles

WAITING_PER_WORKER = 4
"""Bound on the calls queued per worker, whose batches occupy the chief's memory; deep enough that a slow worker does
not stall the others.
"""


class ParameterServerBackend(NoOpCollectives):
    """Chief of asynchronous training: reads the data and dispatches each step to a worker.

    Variables created within `scope` are placed on the parameter servers.
    """

    capabilities = Capabilities(
        sends_together=True,
        needs_builders=True,
        asynchronous=True,
        step_factory="hvdtrain.training.asynchronous:AsynchronousStepFactory",
    )

    def __init__(self, session: Session, opened: OpenStrategy) -> None:
        assert opened.roles is not None, "somebody leads"
        self.session = session
        self._strategy = opened.strategy
        self.name = opened.name
        self.roles = {"chief": 1, "worker": opened.roles.workers, "parameter server": opened.roles.servers}
        self.workers = CoordinatedWorkers(opened.strategy, opened.roles)

    def scope(self) -> AbstractContextManager[Any]:
        return self._strategy.scope()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step` in a worker's replica context, or directly on the chief.

        Stays in this thread: `Strategy.run` would apply gradients in another one, without the contexts that `step` has
        entered.
        """
        if tf.distribute.get_strategy() is not self._strategy:
            return step(*args)
        with tf.distribute.ReplicaContext(self._strategy, 0):
            return step(*args)

    def prepare(self, optimizer: Any) -> None:
        """Disable the optimizer's own gradient aggregation."""
        disable_gradient_sums(optimizer)

    def close(self) -> None:
        self.session.close()


class CoordinatedWorkers:
    """`Workers` on top of tf.distribute's ClusterCoordinator."""

    def __init__(self, strategy: Any, roles: Roles) -> None:
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._roles = roles
        self._waiting: deque[_Result] = deque()

    @property
    def count(self) -> int:
        """Number of workers."""
        return self._roles.workers

    def schedule(self, function: Callable[..., Any], *args: Any) -> "_Result":
        """Dispatch a call; blocks while the queue is full."""
        while len(self._waiting) >= WAITING_PER_WORKER * self.count:
            self._waiting.popleft().fetch()
        result = _Result(self._coordinator, self._coordinator.schedule(function, args=args), self._roles)
        self._waiting.append(result)
        return result

    def join(self) -> None:
        """Wait for all dispatched calls."""
        waiting, self._waiting = self._waiting, deque()
        for result in waiting:
            result.fetch()


class _Result:
    def __init__(self, coordinator: Any, value: Any, roles: Roles) -> None:
        self._coordinator = coordinator
        self._value = value
        self._roles = roles

    def fetch(self) -> Any:
        """Wait for the result.

        Raises:
            LaunchError: a process is gone.
            tf.errors.OpError: this call failed, or was cancelled because another one did.
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
        """Pop the error that cancelled the calls, else re-raised by the next."""
        try:
            self._coordinator.join()
        except tf.errors.OpError as error:
            return error
        return None


def lost_process(message: str, roles: Roles) -> str:
    """Name the process an error refers to: an unreachable server, else the worker."""
    for kind, name in {SERVER: "parameter server", WORKER: "worker"}.items():
        found = re.search(rf"/job:{kind}/replica:\d+/task:(\d+)", message)
        if found:
            index = int(found[1])
            return f"{name} {index} (rank {roles.tasks.index((kind, index))})"
    return "one of its processes"
