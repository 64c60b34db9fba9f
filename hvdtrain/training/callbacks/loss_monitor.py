"""Loss and health of training, read asynchronously.

Each step leaves its totals here without waiting; they are read together on logged steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.config.errors import NonFiniteError, opt
from hvdtrain.training.step.contract import Totals
from hvdtrain.training.step.guard import GOOD, SPIKE, GuardedTotals

MIN_LOSS_SCALE = 1.0
"""Below it, overflows are not caused by scaling."""
UNREAD_STEPS = 1000
"""Bound on unread steps, unless reading makes ranks meet. Beyond it the older half is read, which has completed."""


@dataclass(frozen=True)
class BadStep:
    """A step found bad by a guard, which changed nothing."""

    number: int
    """From 1."""
    where: str
    """Step and epoch, as text."""
    totals: GuardedTotals
    here: Any
    """This replica's part, from `StepGuard.flagged`."""

    @property
    def spike(self) -> bool:
        """Whether its loss was finite, but a spike."""
        return bool(self.totals.verdict == SPIKE)


class LossMonitor:
    """Collects every step's totals: global [weighted loss, weight, poison], or `GuardedTotals`.

    Args:
        steps_per_epoch: None for steps outside of any epoch.
        start_step: completed optimizer steps before the first one.
        start_place: position in the data, in steps over all epochs. Differs from `start_step` if earlier epochs had
            another number of steps.
        skips: whether overflowing steps are skipped, by a dynamic loss scale: their loss does not count.
        raises: whether a loss or a parameter that is not finite is an error.
        early: whether totals may be read before a logged step: it takes no meeting of the ranks.
        epoch_sums: weighted losses and weights of the current epoch before a resume.
    """

    def __init__(
        self,
        steps_per_epoch: int | None,
        start_step: int = 0,
        start_place: int = 0,
        *,
        skips: bool = False,
        raises: bool = True,
        early: bool = True,
        epoch_sums: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._read = start_step
        self._place_of_step_0 = start_place - start_step
        self._skips = skips
        self._raises = raises
        self._early = early
        self._pending: list[tuple[Totals, Any]] = []
        self._bad_steps: list[BadStep] = []
        self._bad_data: int | None = None
        self._bad_loss: int | None = None
        self._empty: list[int] = []
        """Steps that seem to have had no samples, since parameters were seen to be finite and one step before."""
        self._window = np.zeros(2)
        self._epoch = np.array(epoch_sums, np.float64)
        self.skipped = 0
        """Skipped steps among those read."""
        self.epoch_loss = float("nan")
        """Mean loss over the last completed epoch."""

    def begin_epoch(self, step: int, epoch: int) -> None:
        """Note that `epoch`, from 0, begins with `step`, from 1: earlier ones may have had other numbers of steps."""
        self._place_of_step_0 = epoch * (self._steps_per_epoch or 0) - (step - 1)

    def note(self, totals: Totals, here: Any = None) -> None:
        """Record the totals of started steps and this replica's part of them, as in a `StepResult`."""
        self._pending.append((totals, here))
        if self._early and len(self._pending) >= UNREAD_STEPS:
            older, self._pending = self._pending[: UNREAD_STEPS // 2], self._pending[UNREAD_STEPS // 2 :]
            self._take(older)

    def settle(self, *, finite_parameters: bool, loss_scale: float | None = None) -> float:
        """Check pending totals, and return the mean loss since the last call.

        Raises NonFiniteError if the loss or a parameter is NaN or infinite. Non-finite data are reported as the cause,
        but are an error only then: a model may handle them.
        """
        self._take(self._pending)
        self._pending = []
        self._check(finite_parameters, loss_scale)
        window, self._window = self._window, np.zeros(2)
        self._epoch += window
        return _mean(window)

    def pop_bad_steps(self) -> list[BadStep]:
        """Return the bad steps read since the last call."""
        found, self._bad_steps = self._bad_steps, []
        return found

    @property
    def epoch_sums(self) -> tuple[float, float]:
        """Weighted losses and weights of the current epoch, as far as read."""
        return float(self._epoch[0]), float(self._epoch[1])

    def end_epoch(self) -> None:
        """Compute the epoch's mean loss and start the next."""
        self.epoch_loss = _mean(self._epoch)
        self._epoch = np.zeros(2)

    def rewind(self, step: int, epoch_sums: tuple[float, float]) -> None:
        """Discard everything after `step` and restore the epoch's sums."""
        self._pending, self._window = [], np.zeros(2)
        self._epoch = np.array(epoch_sums, np.float64)
        self._read, self._bad_data, self._bad_loss, self._bad_steps = step, None, None, []
        self._empty = []

    def _take(self, results: Sequence[tuple[Totals, Any]]) -> None:
        """Read the totals of subsequent steps."""
        if not results:
            return
        rows = np.concatenate([np.atleast_2d(totals.numpy()) for totals, _ in results]).astype(np.float64)
        guarded = rows.shape[1] == len(GuardedTotals._fields)
        # A batch without samples weighs as one.
        self._empty += (self._read + np.flatnonzero((rows[:, 0] == 0) & (rows[:, 1] <= 1))).tolist()
        if guarded:
            self._set_aside(rows, [each for _, here in results for each in np.atleast_2d(here)])
        finite = np.isfinite(rows[:, 0])
        self._bad_data = _first_bad(rows[:, 2], self._read) if self._bad_data is None else self._bad_data
        self._bad_loss = _first_bad(rows[:, 0], self._read) if self._bad_loss is None else self._bad_loss
        # A guard tells an overflow in the gradient from a loss that is not finite.
        overflowed = ~np.isfinite(rows[:, 3 if guarded else 0]) & self._skips
        self.skipped += int(overflowed.sum())
        self._window += rows[finite, :2].sum(axis=0)
        self._read += len(rows)

    def _set_aside(self, rows: np.ndarray, here: Sequence[Any]) -> None:
        """Move `rows`' bad steps to `pop_bad_steps`, zeroed."""
        bad: np.ndarray = rows[:, GuardedTotals._fields.index("verdict")] != GOOD
        for place in np.flatnonzero(bad).tolist():
            number = self._read + place
            found = BadStep(number + 1, self._place(number), GuardedTotals(*rows[place].tolist()), here[place])
            self._bad_steps.append(found)
        rows[bad] = 0.0

    def _check(self, finite_parameters: bool, loss_scale: float | None) -> None:
        bad_loss, self._bad_loss = self._bad_loss, None
        if self._skips and self._bad_data is None:
            bad_loss = None
        # An activation can hide it from the loss: ReLU makes zeros of NaN.
        if self._raises and (bad_loss is not None or not finite_parameters):
            raise NonFiniteError(self._cause(bad_loss))
        self._empty = [step for step in self._empty if step == self._read - 1]
        if loss_scale is not None and loss_scale < MIN_LOSS_SCALE:
            raise NonFiniteError(
                f"The loss scale fell to {loss_scale:g} by {self._place(self._read - 1)}, and gradients overflow "
                f"still: a lower {opt('learning_rate')}, {opt('clip_norm')} or {opt('precision', 'mixed_bfloat16')} "
                "may help."
            )

    def _cause(self, bad_loss: int | None) -> str:
        if self._bad_data is not None:
            return f"The data hold NaN or infinite values at {self._place(self._bad_data)}."
        before = [step for step in self._empty if bad_loss is None or bad_loss - 1 <= step <= bad_loss]
        if before:
            what, step = ("Parameters", self._read - 1) if bad_loss is None else ("The loss", bad_loss)
            return (
                f"{what} became NaN or infinite by {self._place(step)}, and the batch of {self._place(before[0])} "
                "seems to have no samples, of which layers such as BatchNormalization have no mean. Leave such batches "
                "out: filter samples before batch(), not after it."
            )
        if bad_loss is not None:
            return (
                f"The loss became NaN or infinite at {self._place(bad_loss)}, with sound data: a lower "
                f"{opt('learning_rate')} or a warm-up may help."
            )
        return (
            f"Parameters became NaN or infinite by {self._place(self._read - 1)}, with sound data and a finite "
            f"loss: a lower {opt('learning_rate')} may help, and {opt('log_every', 1)} shows the step."
        )

    def _place(self, step: int) -> str:
        if self._steps_per_epoch is None:
            return f"step {step + 1}"
        epoch = (self._place_of_step_0 + step) // self._steps_per_epoch
        return f"step {step + 1} (epoch {epoch + 1})"


def _first_bad(column: np.ndarray, first: int) -> int | None:
    bad = np.flatnonzero(~np.isfinite(column))
    return first + int(bad[0]) if bad.size else None


def _mean(sums: np.ndarray) -> float:
    return float(sums[0] / sums[1]) if sums[1] else float("nan")
