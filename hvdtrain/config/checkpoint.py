"""Options of checkpoints."""

from hvdtrain.config.best import BestMetric, ModeName, best_metric
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.section import section


@section
class CheckpointConfig:
    """When checkpoints are saved, and how many are kept."""

    checkpoint_every: int | None = None
    """Save every this many steps; None saves at the end of every epoch. The end of training always saves."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    keep_best: str = "val_loss"
    """Keep the checkpoint of the epoch with the best value of this metric as well; `none` keeps only the newest."""
    keep_best_mode: ModeName = "auto"
    """Whether the lowest (`min`) or the highest (`max`) value is best; `auto` infers it from the metric's name."""

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ConfigError(f"--checkpoint-every must be at least 1. Received: {self.checkpoint_every}.")
        if self.keep < 1:
            raise ConfigError(f"--keep must be at least 1. Received: {self.keep}.")
        if self.best is None and self.keep_best_mode != "auto":
            raise ConfigError("--keep-best-mode does nothing with --keep-best none: leave out one of them.")

    @property
    def best(self) -> BestMetric | None:
        """The metric of the best checkpoint; None where none is kept."""
        if self.keep_best == "none":
            return None
        return best_metric(self.keep_best, self.keep_best_mode, option="--keep-best-mode")
