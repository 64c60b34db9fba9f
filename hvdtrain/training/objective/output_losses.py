"""Losses of several outputs individually, as Keras reports them."""

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.training.objective.losses import LossFunction, losses_by_output


class OutputLoss(keras.metrics.Metric):
    """Mean loss of one output over samples, before its loss weight.

    Computed from targets and outputs like any metric: TensorFlow merges it with the step's own computation of the loss.
    """

    def __init__(self, loss: LossFunction, name: str = "loss") -> None:
        super().__init__(name=name)
        self._loss = loss
        self._total = self.add_weight(name="total", initializer="zeros")
        self._samples = self.add_weight(name="samples", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count a batch; weighted losses are divided by the samples, not the weights, as in Keras."""
        summed = self._loss(y_true, y_pred, sample_weight)
        self._total.assign_add(tf.cast(summed.total / summed.elements_per_sample, self.dtype))
        self._samples.assign_add(tf.cast(summed.weight / summed.elements_per_sample, self.dtype))

    def result(self) -> tf.Tensor:
        """Return the mean over the samples so far; 0 initially."""
        return tf.math.divide_no_nan(tf.convert_to_tensor(self._total), tf.convert_to_tensor(self._samples))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of a copy."""
        return {"loss": self._loss, "name": self.name}


def output_losses(loss: Any, names: list[str]) -> dict[str, OutputLoss]:
    """Return a metric for each output with a loss; none if there is a single loss."""
    if loss is None or len(names) < 2:
        return {}
    known = {output: one for output, one in losses_by_output(loss, names).items() if one is not None}
    return {output: OutputLoss(one, f"{output}_loss") for output, one in known.items()} if len(known) > 1 else {}
