"""Horovod's Keras callbacks."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvdtrain.compat.horovod import learning_rate_schedule
from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.collectives import allreduce
from hvdtrain.horovod.flavour import IS_LEGACY, keras, optimizers, refuse_other_keras
from hvdtrain.horovod.functions import FINALIZE, allgather_object, gathered, send, send_states
from hvdtrain.horovod.names import global_process_set, rank, size
from hvdtrain.optim.averaging import innermost
from hvdtrain.runtime.process_sets import collectives_among
from hvdtrain.state.variables import path_of, unwrap, warning_of_adapted

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class OfThisKeras:
    """Rejects models of the other Keras, whose callbacks have other methods."""

    def set_model(self, model: Any) -> None:
        """Set the model, after checking its Keras."""
        refuse_other_keras(model)
        super().set_model(model)  # type: ignore[misc]


class Callback(OfThisKeras, keras.callbacks.Callback):
    """Base class of the face's callbacks."""


class BroadcastGlobalVariablesCallback(Callback):
    """Broadcasts weights and optimizer state from `root_rank` at the start of training.

    Before the first step if the model is built on every rank, otherwise after it, as Horovod always does. Optimizers
    that are attributes of the model are broadcast along with the compiled one, and with Keras 3 what layers hold beside
    variables, such as vocabularies.

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
        if not self.broadcast_done and _is_built_everywhere(self.model):
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
        with tf.device(self.device), warning_of_adapted(list(self._sent.values()) if IS_LEGACY else [], FINALIZE):
            send(self._sent.values(), self.root_rank)
        if not IS_LEGACY:
            send_states(self.model, self.root_rank, apart=self._local)
        self.broadcast_done = True


def _is_built_everywhere(model: Any) -> bool:
    from hvdtrain.compat.keras import flatten_layers  # a script of Keras 2 does without Keras 3

    is_built = all(layer.built for layer in flatten_layers(model))
    return bool(gathered([int(is_built)], collectives_among(global_process_set)).all())


def _optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers of `model`, the compiled one first; a model with its own step may have several."""
    attributes = [getattr(model, "optimizer", None), *vars(model).values()]
    return list({id(each): each for each in attributes if isinstance(each, optimizers.KINDS)}.values())


def _variables_of(model: Any) -> list[Any]:
    """Return the variables of a model and of its optimizers; those of metrics are each rank's own."""
    of_metrics = {id(each) for metric in model.metrics for each in metric.variables}
    variables = [each for each in model.variables if id(each) not in of_metrics]
    return variables + [each for optimizer in _optimizers_of(model) for each in optimizers.state_of(optimizer)]


class MetricAverageCallback(Callback):
    """Averages an epoch's logs over the ranks, for the callbacks after it.

    The keys must be the same on every rank: ConfigError names one that is not.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the logs by their averages."""
        logs = {} if logs is None else logs
        names = sorted(logs)
        self._refuse_missing(allgather_object(names, name="metric_names"))
        if not names:
            return
        with tf.device(self.device):
            averages = allreduce(tf.constant([float(logs[name]) for name in names], tf.float64), name="metrics")
        logs.update(zip(names, averages.numpy().tolist(), strict=True))

    def _refuse_missing(self, everyone: list[list[str]]) -> None:
        """Raise for a key that some ranks lack: averages would be of other metrics, or never come."""
        for name in sorted({name for names in everyone for name in names}):
            lacking = [rank for rank, names in enumerate(everyone) if name not in names]
            if lacking:
                which = f"rank {lacking[0]}" if len(lacking) == 1 else f"ranks {', '.join(map(str, lacking))}"
                cure = (
                    "Pass validation_data to fit on every rank"
                    if name.startswith("val_")
                    else "Have every rank report it, or list the callback that adds it after MetricAverageCallback"
                )
                raise ConfigError(
                    f"MetricAverageCallback averages the logs of all ranks. Received: no {name!r} on {which}. {cure}."
                )


class _LearningRate(learning_rate_schedule()):  # type: ignore[misc]
    """Adapts Horovod's schedules to today's Keras: reading and setting the rate, and momentum correction."""

    model: Any

    def set_rate(self, epoch: float) -> None:
        """Set the rate, and scale velocities where the momentum is corrected."""
        optimizer = self.model.optimizer
        old = _rate_of(optimizer)
        new = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        if self.momentum_correction and old:
            _scale_velocities(innermost(optimizer), new / old)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the logs."""
        if logs is not None:
            logs["lr"] = _rate_of(self.model.optimizer)


class LearningRateScheduleCallback(_LearningRate, Callback):
    """Sets the learning rate to `initial_lr * multiplier` from `start_epoch` to `end_epoch`.

    Momentum correction scales the velocities with the rate, which equals scaling the momentum for one step (except for
    Nesterov's look-ahead): Keras compiles the momentum into the step as a constant.

    Args:
        initial_lr: the learning rate at the start of training.
        multiplier: a function of the epoch, or a constant c for c ** (epoch - start_epoch).
        start_epoch: the first epoch.
        end_epoch: the epoch to stop before.
        staircase: set the rate at the start of each epoch; otherwise at every batch, for a fractional epoch.
        momentum_correction: scale the velocities of optimizers with momentum.
        steps_per_epoch: inferred if Keras knows the number of steps.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__(
            None, initial_lr, multiplier, start_epoch, end_epoch, staircase, momentum_correction, steps_per_epoch
        )


class LearningRateWarmupCallback(_LearningRate, Callback):
    """Raises the learning rate from `initial_lr / hvd.size()` to `initial_lr` over some epochs.

    After Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour". For further arguments see
    `LearningRateScheduleCallback`.

    Args:
        initial_lr: the final learning rate.
        warmup_epochs: epochs of the warm-up.
        momentum_correction: see there.
        steps_per_epoch: see there.
        verbose: 1 prints a line on rank 0 when the warm-up ends.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(None, initial_lr, self._share, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def _share(self, epoch: float) -> float:
        # The fractional epoch is one batch ahead, so that an epoch ends at an integer.
        after = epoch + 1.0 / self.steps_per_epoch
        return (after * (size() - 1) / self.end_epoch + 1) / size()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the logs, and report the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.end_epoch - 1 and self.verbose > 0 and rank() == 0:
            rate = _rate_of(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(OfThisKeras, keras.callbacks.ModelCheckpoint):
    """Saves the best model; set `filepath` on it before training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        super().__init__(
            filepath="best.weights.h5" if save_weights_only else "best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse to train without a `filepath`."""
        if not self.filepath:
            raise ConfigError("BestModelCheckpoint: set callback.filepath = 'model.keras' before training.")
        super().on_train_begin(logs)


def _rate_of(optimizer: Any) -> float:
    """Return the learning rate.

    Raises:
        ConfigError: it is a schedule, in an optimizer of tf.keras.optimizers.legacy; others refuse the assignment
            themselves.
    """
    rate = optimizer.learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        raise ConfigError("The learning rate is a schedule already, so no callback can set it: give a number.")
    return float(tf.convert_to_tensor(rate))


def _scale_velocities(optimizer: Any, factor: float) -> None:
    """Multiply the velocities of an optimizer with momentum, as far as they exist.

    Raises:
        ConfigError: it has momentum, but its velocities are unknown.
    """
    if not getattr(optimizer, "momentum", 0.0) or factor == 1.0:
        return
    velocities = optimizers.velocities_of(optimizer)
    if velocities is None:
        raise ConfigError(
            f"Where {type(optimizer).__name__} keeps its velocities is not known: pass momentum_correction=False."
        )
    for velocity in velocities:
        velocity.assign(velocity * factor)
