"""Checkpoint options and the metric that selects the best checkpoint."""

import math
import os
import re
from dataclasses import dataclass
from typing import Literal

from hvdtrain.config.errors import ConfigError, in_script, opt
from hvdtrain.config.options import excludes, flag, section, validate

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


def best_metric(name: str, mode: ModeName) -> BestMetric:
    """Return the metric `name`; mode `auto` infers the direction from words in the name.

    Raises:
        ConfigError: the direction cannot be inferred.
    """
    if mode != "auto":
        return BestMetric(name, mode)
    words = re.split(r"[^a-z0-9]+", name.lower())
    if any(re.fullmatch(_LOWER_IS_BETTER, word) for word in words):
        return BestMetric(name, "min")
    if any(re.fullmatch(_HIGHER_IS_BETTER, word) for word in words):
        return BestMetric(name, "max")
    option = opt("keep_best_mode", argument=False)
    raise ConfigError(
        f"The name of a metric must tell whether low or high values are better, unless {option} does. "
        f"Received: {name!r}, in which no word such as loss or accuracy does. Correct the name, or set {option} to min "
        "or max."
    )


GRACE_S = 120.0
"""Clouds give 30 to 120 s of notice before they reclaim a spot instance; Kubernetes and Slurm kill after 30 s by
default.
"""


@section
class CheckpointConfig:
    """When to save checkpoints, and how many to keep."""

    checkpoint_every: int | None = flag(None, "[1, inf)")
    """Save every this many steps; None saves at the end of every epoch. The end of training always saves."""
    keep: int = flag(3, "[1, inf)")
    """Number of most recent checkpoints to keep."""
    keep_best: str = flag("val_loss")
    """Also keep the checkpoint of the epoch with the best value of this metric; `none` keeps only the most recent."""
    keep_best_mode: ModeName = flag("auto", excludes("keep_best=none"))
    """Whether lower (`min`) or higher (`max`) is better; `auto` infers it from the metric's name."""
    keep_every_hours: float | None = flag(None, "(0, inf)")
    """Also keep the first checkpoint, and one every N hours from then on; None keeps none by age."""
    grace_seconds: float = flag(GRACE_S, "(0, inf)")
    """Seconds from SIGTERM, SIGUSR1 or Ctrl-C until the process exits, even if the last step is not saved by then."""

    def __post_init__(self) -> None:
        validate(self)
        _ = self.best

    @property
    def best(self) -> BestMetric | None:
        """The metric of the best checkpoint; None if no best checkpoint is kept."""
        if self.keep_best == "none":
            return None
        return best_metric(self.keep_best, self.keep_best_mode)


ARGUMENTS = {
    "checkpoint_every": "every",
    "keep_best": "best",
    "keep_best=none": "best=None",
    "keep_best_mode": "mode",
    **{name: name for name in ("keep", "keep_every_hours", "grace_seconds")},
}
"""Options -> arguments of `Checkpoint`."""


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

    Example::

        saves = hvdtrain.Checkpoint("checkpoints", every=100, keep=2, best="val_loss")
        trainer.fit(x, y, batch=64, epochs=2, validation_data=(x, y), checkpoint=saves)
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    keep: int = 3
    best: str | None = None
    mode: ModeName = "auto"
    keep_every_hours: float | None = None
    grace_seconds: float = GRACE_S

    def __post_init__(self) -> None:
        if not os.fspath(self.folder):
            raise ConfigError("Checkpoint(folder) must be the path of a folder. Received: an empty one.")
        best = "none" if self.best is None else self.best
        try:
            CheckpointConfig(
                checkpoint_every=self.every,
                keep=self.keep,
                keep_best=best,
                keep_best_mode=self.mode,
                keep_every_hours=self.keep_every_hours,
                grace_seconds=self.grace_seconds,
            )
        except ConfigError as error:
            raise ConfigError(f"Checkpoint: {in_script(error.message, ARGUMENTS)}") from None

    @property
    def metric(self) -> BestMetric | None:
        """The metric of the best checkpoint; None if no best checkpoint is kept."""
        return None if self.best is None else best_metric(self.best, self.mode)


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
