"""The metric by which the best checkpoint is chosen."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from hvdtrain.config.errors import ConfigError

ModeName = Literal["auto", "min", "max"]

_LOWER_IS_BETTER = "loss|error|err|mse|mae|rmse|mape|msle|crossentropy|perplexity|divergence|hinge|cosh|poisson"
_HIGHER_IS_BETTER = "accuracy|acc|auc|precision|recall|sensitivity|specificity|f1|fbeta|iou|io|dice|r2|similarity|bleu"


@dataclass(frozen=True)
class BestMetric:
    """The figure of an epoch by which the best checkpoint is chosen, and whether the lowest or the highest is best."""

    name: str
    """As in the history of `fit`: `loss`, `accuracy`, `val_loss` …"""
    mode: Literal["min", "max"]

    def improves(self, value: float, best: float | None) -> bool:
        """Tell whether `value` is better than `best`, the best one so far; NaN is never better."""
        if math.isnan(value) or best is None:
            return not math.isnan(value)
        return value < best if self.mode == "min" else value > best


def best_metric(name: str, mode: ModeName, *, option: str) -> BestMetric:
    """Return the metric `name` with its mode, which `auto` infers from the words of the name.

    Args:
        name: of the metric.
        mode: `min`, `max` or `auto`.
        option: the option that sets the mode, as errors call it.

    Raises:
        ConfigError: an unknown mode, or a name from which none can be inferred.
    """
    if mode not in ("auto", "min", "max"):
        raise ConfigError(f"{option} must be auto, min or max. Received: {mode!r}.")
    if mode != "auto":
        return BestMetric(name, mode)
    words = re.split(r"[^a-z0-9]+", name.lower())
    if any(re.fullmatch(_LOWER_IS_BETTER, word) for word in words):
        return BestMetric(name, "min")
    if any(re.fullmatch(_HIGHER_IS_BETTER, word) for word in words):
        return BestMetric(name, "max")
    raise ConfigError(
        f"The name of a metric must tell whether low or high values are better, unless {option} does. "
        f"Received: {name!r}. Set {option} to min or max."
    )
