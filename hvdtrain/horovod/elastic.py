"""Elastic training: state that outlives the loss and the arrival of ranks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import init
from hvdtrain.horovod.distribution import distribution_of
from hvdtrain.horovod.flavour import IS_LEGACY, optimizers, refuse_other_keras
from hvdtrain.horovod.functions import broadcast_object, broadcast_object_fn, broadcast_variables, send_states
from hvdtrain.horovod.names import rank, shutdown
from hvdtrain.runtime.consequences import is_cut_off
from hvdtrain.state.variables import unwrap

__all__ = [
    "HorovodInternalError",
    "ObjectState",
    "TensorFlowKerasState",
    "TensorFlowState",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "init",
    "rank",
    "run",
    "run_fn",
    "shutdown",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func(state, …)` so that it begins again, from the last commit, when ranks leave or come.

    What `func` returns is returned; errors that are not the exchange's are raised as they are.
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except (tf.errors.UnknownError, tf.errors.AbortedError) as error:
            if not is_cut_off(error):
                raise
            raise HorovodInternalError(error) from error

    return run_fn(wrapper, _reset)


def _reset() -> None:
    shutdown()
    init()


class _VariablesState(ObjectState):
    """Variables and plain properties, kept in memory at every commit."""

    _variables: Callable[[], Sequence[Any]]

    def __init__(self, variables: Callable[[], Sequence[Any]], **kwargs: Any) -> None:
        self._variables = variables
        self._save_values()
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)

    def save(self) -> None:
        """Keep what variables and properties are now."""
        self._save_values()
        super().save()

    def restore(self) -> None:
        """Return to what was kept last."""
        for variable, value in zip(self._variables(), self._values, strict=True):
            unwrap(variable).assign(value)
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's variables and properties, and keep them."""
        broadcast_variables(self._variables(), root_rank=0)
        self._save_values()
        super().sync()

    def _save_values(self) -> None:
        self._values = [np.array(unwrap(variable).numpy()) for variable in self._variables()]


class TensorFlowState(_VariablesState):
    """A list of variables, and further properties that become attributes.

    Raises:
        ConfigError: no variables, of which TensorFlow 2 keeps no list of its own; or a session.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise ConfigError("TensorFlowState: TensorFlow 2 has no sessions. Leave session out.")
        if not variables:
            raise ConfigError(
                "TensorFlowState: TensorFlow 2 keeps no list of all variables. Pass "
                "variables=model.variables + optimizer.variables."
            )
        self.variables = list(variables)
        self.session = None
        super().__init__(lambda: self.variables, **kwargs)


class TensorFlowKerasState(_VariablesState):
    """A Keras model, its optimizer (the compiled one if None), and further properties that become attributes.

    Raises:
        ConfigError: the model is not built yet, has no optimizer, or is not of this process's Keras.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        refuse_other_keras(model)
        if not model.built:
            raise ConfigError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = optimizer or model.optimizer
        if self.optimizer is None:
            raise ConfigError("TensorFlowKerasState: pass optimizer=…, or compile the model.")
        self.backend = backend
        optimizers.built(self.optimizer, model.trainable_variables)
        super().__init__(lambda: [*self.model.variables, *optimizers.state_of(self.optimizer)], **kwargs)

    def restore(self) -> None:
        """Return to what was kept last; gradients that wait for further passes are forgotten."""
        super().restore()
        self._forget_passes()

    def sync(self) -> None:
        """Take over rank 0's model, optimizer and properties, and keep them."""
        if not IS_LEGACY:
            send_states(self.model, 0)
        super().sync()
        self._forget_passes()

    def _forget_passes(self) -> None:
        distribution = distribution_of(self.optimizer)
        if distribution is not None:
            distribution.forget()
