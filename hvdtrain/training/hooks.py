"""What may look into the loop and end it: Keras callbacks, in the end."""

from collections.abc import Mapping
from typing import Protocol

import tensorflow as tf


class Hooks(Protocol):
    """Called on every replica, with figures over all of them."""

    def begin_epoch(self, epoch: int) -> None:
        """Receive an epoch that begins, from 0."""

    def begin_step(self, number: int) -> None:
        """Receive a step that begins, from 0 within its epoch."""

    def end_step(self, number: int, totals: tf.Tensor) -> None:
        """Receive a finished step and its totals: weighted loss and weight come first."""

    def begin_evaluation(self) -> None:
        """Notice that the validation data are about to be evaluated."""

    def end_evaluation(self, logs: Mapping[str, float]) -> None:
        """Receive the evaluation's loss and metrics."""

    def end_epoch(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Receive an epoch's loss and metrics, those of its evaluation with `val_` before their names."""

    def stops(self) -> bool:
        """Tell whether training is to end here; alike on all replicas, which call it together."""


class NoHooks:
    """Nobody looks in."""

    def begin_epoch(self, epoch: int) -> None:
        """Ignore the epoch."""

    def begin_step(self, number: int) -> None:
        """Ignore the step."""

    def end_step(self, number: int, totals: tf.Tensor) -> None:
        """Ignore the step."""

    def begin_evaluation(self) -> None:
        """Ignore the evaluation."""

    def end_evaluation(self, logs: Mapping[str, float]) -> None:
        """Ignore the evaluation."""

    def end_epoch(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Ignore the epoch."""

    def stops(self) -> bool:
        """Let training go on."""
        return False
