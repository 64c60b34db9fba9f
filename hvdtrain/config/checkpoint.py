"""Checkpoint options and the metric that selects the best checkpoint."""

import math
import os
import re
from dataclasses import dataclass
from typing import Literal

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.section import section

ModeName = Literal["auto", "min", "max"]

_LOWER_IS_BETTER = "loss|error|err|mse|mae|rmse|mape|msle|crossentropy|perplexity|divergence|hinge|cosh|poisson"
_HIGHER_IS_BETTER = "accuracy|acc|auc|precision|recall|sensitivity|specificity|f1|fbeta|iou|io|dice|r2|similarity|bleu"


@dataclass(frozen=True)
class BestMetric:
    """The metric that selects the best checkpoint, and its direction."""

    name: str
    """As in the history of `fit`: `loss`, `accuracy`, `val_loss` …"""
    mode: Literal["min", "max"]

    def improves(self, value: float, best: float | None) -> bool:
        """Return whether `value` is better than `best`, the best so far; NaN never is."""
        if math.isnan(value) or best is None:
            return not math.isnan(value)
        return value < best if self.mode == "min" else value > best


def best_metric(name: str, mode: ModeName, *, option: str) -> BestMetric:
    """Return the metric `name`; mode `auto` infers the direction from words in the name.

    Args:
        name: metric name.
        mode: `min`, `max` or `auto`.
        option: the mode option's name, for error messages.

    Raises:
        ConfigError: unknown mode, or the direction cannot be inferred.
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


GRACE_S = 120.0
"""Clouds give 30 to 120 s of notice before they reclaim a spot instance; Kubernetes and Slurm kill after 30 s by
default.
"""


@section
class CheckpointConfig:
    """When to save checkpoints, and how many to keep."""

    checkpoint_every: int | None = None
    """Save every this many steps; None saves at the end of every epoch. The end of training always saves."""
    keep: int = 3
    """Number of most recent checkpoints to keep."""
    keep_best: str = "val_loss"
    """Also keep the checkpoint of the epoch with the best value of this metric; `none` keeps only the most recent."""
    keep_best_mode: ModeName = "auto"
    """Whether lower (`min`) or higher (`max`) is better; `auto` infers it from the metric's name."""
    keep_every_hours: float | None = None
    """Also keep the first checkpoint, and one every N hours from then on; None keeps none by age."""
    grace_seconds: float = GRACE_S
    """Seconds from SIGTERM, SIGUSR1 or Ctrl-C until the process exits, even if the last step is not saved by then."""

    def __post_init__(self) -> None:
        _check_positive(self.keep_every_hours, "hours", "--keep-every-hours")
        _check_positive(self.grace_seconds, "seconds", "--grace-seconds")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ConfigError(f"--checkpoint-every must be at least 1. Received: {self.checkpoint_every}.")
        if self.keep < 1:
            raise ConfigError(f"--keep must be at least 1. Received: {self.keep}.")
        if self.best is None and self.keep_best_mode != "auto":
            raise ConfigError("--keep-best-mode does nothing with --keep-best none: leave out one of them.")

    @property
    def best(self) -> BestMetric | None:
        """The metric of the best checkpoint; None if no best checkpoint is kept."""
        if self.keep_best == "none":
            return None
        return best_metric(self.keep_best, self.keep_best_mode, option="--keep-best-mode")


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint policy for `Trainer.fit(checkpoint=…)`: the full training state, saved atomically.

    Args:
        folder: parent of the checkpoints, `folder/step-N`; only rank 0 needs to see it.
        every: save every N optimizer steps; None saves at the end of every epoch. The end of training always saves.
        keep: number of most recent checkpoints to keep.
        best: also keep the checkpoint of the epoch with the best value of this metric, such as `"val_loss"`; None keeps
            only the most recent.
        mode: whether lower (`"min"`) or higher (`"max"`) is better; `"auto"` infers it from the name.
        keep_every_hours: also keep the first checkpoint, and one every N hours from then on; None keeps none by age.
        grace_seconds: seconds from SIGTERM, SIGUSR1 or Ctrl-C until the process exits, even if the last step is not
            saved by then.

    Raises:
        ConfigError: an invalid value.
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    keep: int = 3
    best: str | None = None
    mode: ModeName = "auto"
    keep_every_hours: float | None = None
    grace_seconds: float = GRACE_S

    def __post_init__(self) -> None:
        _check_positive(self.keep_every_hours, "hours", "Checkpoint(keep_every_hours=…)")
        _check_positive(self.grace_seconds, "seconds", "Checkpoint(grace_seconds=…)")
        if not os.fspath(self.folder):
            raise ConfigError("Checkpoint(folder) must be the path of a folder. Received: an empty one.")
        for name, value in {"every": self.every, "keep": self.keep}.items():
            if value is not None and (not hasattr(value, "__index__") or value < 1):
                raise ConfigError(f"Checkpoint({name}=…) must be at least 1. Received: {value!r}.")
        if self.best is None and self.mode != "auto":
            raise ConfigError(f"Checkpoint(mode={self.mode!r}) needs a metric: add best=METRIC, such as 'val_loss'.")
        _ = self.metric

    @property
    def metric(self) -> BestMetric | None:
        """The metric of the best checkpoint; None if no best checkpoint is kept."""
        return None if self.best is None else best_metric(self.best, self.mode, option="Checkpoint(mode=…)")


def _check_positive(value: float | None, unit: str, option: str) -> None:
    if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
        raise ConfigError(f"{option} must be a number of {unit} above 0. Received: {value!r}.")


def checkpoint_of(given: Checkpoint | str | os.PathLike[str] | None) -> Checkpoint | None:
    """Normalize the `checkpoint` argument of `fit`; a bare path gets the default policy.

    Raises:
        ConfigError: neither a path nor a `Checkpoint`.
    """
    if isinstance(given, str | os.PathLike):
        return Checkpoint(given)
    if given is None or isinstance(given, Checkpoint):
        return given
    raise ConfigError(f"checkpoint is an hvdtrain.Checkpoint, or the path of a folder. Received: {given!r}.")
