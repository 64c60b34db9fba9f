"""When a training ends, logs, evaluates and saves."""

from dataclasses import KW_ONLY, dataclass

from hvdtrain.config.checkpoint import BestMetric
from hvdtrain.training.callbacks.base import When


@dataclass(frozen=True)
class Plan:
    """Plan of a training: when it ends, logs, evaluates and saves, in optimizer steps."""

    total_steps: int
    _: KW_ONLY
    log_every: int = 10
    checkpoint_every: int | None = None
    """None: at the end of every epoch."""
    commit_every: int | None = None
    """Steps between commits of elastic training; None: not elastic."""
    best: BestMetric | None = None
    """Metric whose best epoch is also saved."""
    validation_freq: int | tuple[int, ...] = 1
    """Epochs between evaluations, or the epochs to evaluate after, counted from 1."""
    epoch_offset: int = 0
    """Added to the state's epoch in messages: `fit` counts from its `initial_epoch`."""
    until_epoch: int | None = None
    """The state's epoch at the end, for data whose passes differ in length; then `total_steps` is expected."""

    def evaluates(self, epoch: int) -> bool:
        """Return whether `epoch`, from 0, ends with an evaluation."""
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq

    @property
    def logged(self) -> When:
        """Logged steps."""
        return When(every=self.log_every, first=True, epoch_ends=True, last=True)

    @property
    def saved(self) -> When:
        """Steps after which the state is saved, if at all."""
        return When(every=self.checkpoint_every, epoch_ends=self.checkpoint_every is None, last=True, stops=True)

    @property
    def committed(self) -> When:
        """Steps after which the state is committed, if at all."""
        return When(every=self.commit_every)
