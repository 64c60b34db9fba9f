"""The losses of several outputs one by one, as Keras reports them beside their weighted total."""

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.training.objective.losses import LossFunction, losses_by_output


class OutputLoss(keras.metrics.Metric):
    """Mean loss of one output over samples, before its loss weight.

    It is computed from targets and outputs, like any metric: within one graph TensorFlow computes a loss once that the
    step computes as well.

    Args:
        loss: the loss as sum and weight.
        name: what its value is called.
    """

    def __init__(self, loss: LossFunction, name: str = "loss") -> None:
        super().__init__(name=name)
        self._loss = loss
        self._total = self.add_weight(name="total", initializer="zeros")
        self._samples = self.add_weight(name="samples", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count a batch; its weighted losses are divided by its samples and not by their weights, as in Keras."""
        summed = self._loss(y_true, y_pred, sample_weight)
        self._total.assign_add(tf.cast(summed.total / summed.elements_per_sample, self.dtype))
        self._samples.assign_add(tf.cast(summed.weight / summed.elements_per_sample, self.dtype))

    def result(self) -> tf.Tensor:
        """Return the mean over the samples so far; 0 before there are any."""
        return tf.math.divide_no_nan(tf.convert_to_tensor(self._total), tf.convert_to_tensor(self._samples))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of a copy."""
        return {"loss": self._loss, "name": self.name}


def output_losses(loss: Any, names: list[str]) -> dict[str, OutputLoss]:
    """Return the metric of each output that has a loss; none where there is one loss alone.

    Args:
        loss: losses as `Model.compile` takes them.
        names: the outputs' names.
    """
    if loss is None or len(names) < 2:
        return {}
    known = {output: one for output, one in losses_by_output(loss, names).items() if one is not None}
    return {output: OutputLoss(one, f"{output}_loss") for output, one in known.items()} if len(known) > 1 else {}
