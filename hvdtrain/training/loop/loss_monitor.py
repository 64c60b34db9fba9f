"""The loss and the health of training, kept as tensors until somebody asks.

Each step leaves its totals here without waiting for them; they are read together on logged steps.
"""

import numpy as np

from hvdtrain.config.errors import NonFiniteError
from hvdtrain.training.step.result import Totals

MIN_LOSS_SCALE = 1.0
"""Below it nothing is left that scaling could do: what overflows then overflows without it."""


class LossMonitor:
    """Collects the totals of every step: [weighted loss, weight, poison] over all replicas.

    Args:
        steps_per_epoch: to name a step's epoch.
        start_step: steps that were finished before the first that is noted.
        skips: whether steps that overflow are skipped, by a dynamic loss scale: their loss counts nothing then.
        epoch_sums: weighted losses and weights of the epoch under way, counted before.
    """

    def __init__(
        self,
        steps_per_epoch: int,
        start_step: int = 0,
        *,
        skips: bool = False,
        epoch_sums: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._settled = start_step
        self._skips = skips
        self._pending: list[Totals] = []
        self._bad_data: int | None = None
        self._epoch = np.array(epoch_sums, np.float64)
        self.epoch_loss = float("nan")
        """Mean loss over the samples of the epoch that ended last."""

    def note(self, totals: Totals) -> None:
        """Keep the totals of the step that was just started."""
        self._pending.append(totals)

    def settle(self, *, finite_parameters: bool, loss_scale: float | None = None) -> float:
        """Read what is pending, look whether all is finite, and return the mean loss since the last call.

        Args:
            finite_parameters: whether the parameters are finite by now.
            loss_scale: the dynamic loss scale by now.

        Raises:
            NonFiniteError: the loss or a parameter is NaN or infinite. Data that are not finite are blamed for that,
                but are an error only then: a model may know what to do with them.
        """
        rows = np.array([totals.numpy() for totals in self._pending], np.float64).reshape(-1, 3)
        first, self._settled = self._settled, self._settled + len(rows)
        self._pending.clear()
        self._look(rows, first, finite_parameters)
        if loss_scale is not None and loss_scale < MIN_LOSS_SCALE:
            raise NonFiniteError(
                f"The loss scale fell to {loss_scale:g} by {self._place(self._settled - 1)}, and gradients overflow "
                "still: a lower --learning-rate, --clip-norm or --precision mixed_bfloat16 may help."
            )
        window = rows[np.isfinite(rows[:, 0]), :2].sum(axis=0)
        self._epoch += window
        return _mean(window)

    @property
    def epoch_sums(self) -> tuple[float, float]:
        """Weighted losses and weights of the epoch under way, as far as they were read."""
        return float(self._epoch[0]), float(self._epoch[1])

    def end_epoch(self) -> None:
        """Form the epoch's mean loss and start the next."""
        self.epoch_loss = _mean(self._epoch)
        self._epoch = np.zeros(2)

    def _look(self, rows: np.ndarray, first: int, finite_parameters: bool) -> None:
        if self._bad_data is None:
            self._bad_data = _first_bad(rows[:, 2], first)
        bad_loss = _first_bad(rows[:, 0], first)
        if self._skips and self._bad_data is None:
            bad_loss = None
        # An activation can hide it from the loss: ReLU makes zeros of NaN.
        if bad_loss is None and finite_parameters:
            return
        if self._bad_data is not None:
            raise NonFiniteError(f"The data hold NaN or infinite values at {self._place(self._bad_data)}.")
        if bad_loss is not None:
            raise NonFiniteError(
                f"The loss became NaN or infinite at {self._place(bad_loss)}, with sound data: a lower "
                "--learning-rate or a warm-up may help."
            )
        raise NonFiniteError(
            f"Parameters became NaN or infinite by {self._place(self._settled - 1)}, with sound data and a finite "
            "loss: a lower --learning-rate may help, and --log-every 1 shows the step."
        )

    def _place(self, step: int) -> str:
        return f"step {step + 1} (epoch {step // self._steps_per_epoch + 1})"


def _first_bad(column: np.ndarray, first: int) -> int | None:
    bad = np.flatnonzero(~np.isfinite(column))
    return first + int(bad[0]) if bad.size else None


def _mean(sums: np.ndarray) -> float:
    return float(sums[0] / sums[1]) if sums[1] else float("nan")
