"""The callback that broadcasts a model and its optimizers at the start of training."""

import warnings
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import global_process_set
from hvdtrain.horovod.exchange import exchange_among
from hvdtrain.horovod.flavour import optimizers
from hvdtrain.horovod.keras.base import Callback
from hvdtrain.horovod.same_variables import gathered
from hvdtrain.horovod.variables import send
from hvdtrain.state.variables import path_of, unwrap


class BroadcastGlobalVariablesCallback(Callback):
    """Broadcasts weights and optimizer state from `root_rank` at the start of training.

    Before the first step if the model is built on every rank, otherwise after it, as Horovod always does. Optimizers
    that are attributes of the model are broadcast along with the compiled one.

    Args:
        root_rank: the rank to broadcast from.
        device: the device of the broadcast.
        local_variables: a variable, or several, to leave local.

    Raises:
        ConfigError: the model has no weights after the first step, or the ranks' variables differ.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._sent: dict[int, tf.Variable] = {}
        self._local: dict[int, tf.Variable] = {}
        alone = local_variables is None or hasattr(local_variables, "assign")
        given: Iterable[Any] = [local_variables] if alone else local_variables
        for variable in given:
            if variable is not None:
                self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Do not broadcast `var`."""
        if not hasattr(var, "assign"):
            raise ConfigError("All local variables must be of tf.Variable type.")
        self._local[id(unwrap(var))] = unwrap(var)

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast before the first step a model that every rank has built."""
        if not self.broadcast_done and _on_every_rank(_is_built(self.model)):
            own = _optimizers_of(self.model)
            if len(own) == 1:  # of several, which trains what is unknown before the step
                optimizers.built(own[0], self.model.trainable_variables)
            self._broadcast()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first step a model that was built in it."""
        if not self.broadcast_done:
            self._broadcast()

    def on_train_end(self, logs: Any = None) -> None:
        """Warn of weights that were created after the broadcast."""
        if not self.broadcast_done:
            return
        late = [path_of(each) for each in self.model.weights if id(unwrap(each)) not in self._sent | self._local]
        if late:
            warnings.warn(
                f"{', '.join(late)} of {self.model.name} were created after BroadcastGlobalVariablesCallback had run, "
                "so they may differ between the ranks: build them before the first step ends.",
                stacklevel=2,
            )

    def _broadcast(self) -> None:
        variables = {id(unwrap(each)): unwrap(each) for each in _variables_of(self.model)}
        if not self.model.weights:
            raise ConfigError(
                f"BroadcastGlobalVariablesCallback found nothing to broadcast: {self.model.name} has no weights "
                "after its first step. Assign layers and variables to attributes of the model, where Keras finds them."
            )
        self._sent = {key: variable for key, variable in variables.items() if key not in self._local}
        with tf.device(self.device):
            send(self._sent.values(), self.root_rank)
        self.broadcast_done = True


def _on_every_rank(value: bool) -> bool:
    return bool(gathered([int(value)], exchange_among(global_process_set)).all())


def _is_built(model: Any) -> bool:
    from hvdtrain.compat.keras import flatten_layers  # a script of Keras 2 does without Keras 3

    return all(layer.built for layer in flatten_layers(model))


def _optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers of `model`, the compiled one first; a model with its own step may have several."""
    attributes = [getattr(model, "optimizer", None), *vars(model).values()]
    return list({id(each): each for each in attributes if isinstance(each, optimizers.KINDS)}.values())


def _variables_of(model: Any) -> list[Any]:
    """Return the variables of a model and of its optimizers; those of metrics are each rank's own."""
    of_metrics = {id(each) for metric in model.metrics for each in metric.variables}
    variables = [each for each in model.variables if id(each) not in of_metrics]
    return variables + [each for optimizer in _optimizers_of(model) for each in optimizers.state_of(optimizer)]
