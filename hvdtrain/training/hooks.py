"""What may look into the loop and end it: Keras callbacks, in the end."""

from collections.abc import Mapping

import tensorflow as tf


class Hooks:
    """Called on every replica, with figures over all of them; nobody looks in unless a method is overridden."""

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
        return False
