"""Horovod's Keras callbacks."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.compat.horovod import learning_rate_schedule
from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import rank, size
from hvdtrain.horovod.collectives import allreduce
from hvdtrain.horovod.flavour import keras, optimizers
from hvdtrain.horovod.keras.base import Callback, OfThisKeras
from hvdtrain.horovod.keras.broadcast import BroadcastGlobalVariablesCallback
from hvdtrain.optim.averaging import innermost

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class MetricAverageCallback(Callback):
    """Averages an epoch's logs over the ranks, for the callbacks after it.

    The keys must be the same on every rank.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the logs by their averages."""
        if not logs:
            return
        names = sorted(logs)
        with tf.device(self.device):
            averages = allreduce(tf.constant([float(logs[name]) for name in names], tf.float64), name="metrics")
        logs.update(zip(names, averages.numpy().tolist(), strict=True))


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
