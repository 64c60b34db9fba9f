"""Loss and metrics for labels that augmentation has blended into shares."""

from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError

_metrics = keras.metrics
OF_SHARES = {
    _metrics.SparseCategoricalAccuracy: _metrics.CategoricalAccuracy,
    _metrics.SparseTopKCategoricalAccuracy: _metrics.TopKCategoricalAccuracy,
    _metrics.SparseCategoricalCrossentropy: _metrics.CategoricalCrossentropy,
}
"""Metrics of labels, and the same of shares."""


def has_soft_labels(config: DataConfig) -> bool:
    """Tell whether targets are shares of the labels, in place of labels."""
    return "mixup" in config.augment


def soft_label_loss(config: DataConfig, loss: Any) -> Any:
    """Return the loss for targets that are shares of the labels, where the data are blended; else `loss`.

    Raises:
        ConfigError: a loss that has no such form.
    """
    if not has_soft_labels(config):
        return loss
    loss = keras.losses.get(loss)
    if not isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        raise ConfigError(f"--augment mixup blends labels: it needs the cross-entropy of labels. Received: {loss}.")
    return keras.losses.CategoricalCrossentropy(from_logits=loss.get_config()["from_logits"])


def soft_label_metrics(config: DataConfig, metrics: Sequence[Any]) -> list[Any]:
    """Do for metrics what `soft_label_loss` does for the loss."""
    if not has_soft_labels(config):
        return list(metrics)
    return [
        OF_SHARES[type(metric)].from_config(metric.get_config()) if type(metric) in OF_SHARES else metric
        for metric in metrics
    ]
