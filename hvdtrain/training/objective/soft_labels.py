"""Losses and metrics for soft labels, such as from MixUp."""

from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError

_metrics = keras.metrics
SOFT_LABEL_METRICS = {
    _metrics.SparseCategoricalAccuracy: _metrics.CategoricalAccuracy,
    _metrics.SparseTopKCategoricalAccuracy: _metrics.TopKCategoricalAccuracy,
    _metrics.SparseCategoricalCrossentropy: _metrics.CategoricalCrossentropy,
}
"""Soft-label counterparts of hard-label metrics."""


def has_soft_labels(config: DataConfig) -> bool:
    """Return whether targets are soft labels."""
    return "mixup" in config.augment


def soft_label_loss(config: DataConfig, loss: Any) -> Any:
    """Return the soft-label counterpart of `loss` if targets are soft labels; else `loss`.

    Raises ConfigError if there is no counterpart.
    """
    if not has_soft_labels(config):
        return loss
    loss = keras.losses.get(loss)
    if not isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        raise ConfigError(f"--augment mixup blends labels: it needs the cross-entropy of labels. Received: {loss}.")
    return keras.losses.CategoricalCrossentropy(from_logits=loss.get_config()["from_logits"])


def soft_label_metrics(config: DataConfig, metrics: Sequence[Any]) -> list[Any]:
    """Return the soft-label counterparts of `metrics` if targets are soft labels."""
    if not has_soft_labels(config):
        return list(metrics)
    return [
        SOFT_LABEL_METRICS[type(metric)].from_config(metric.get_config())
        if type(metric) in SOFT_LABEL_METRICS
        else metric
        for metric in metrics
    ]
