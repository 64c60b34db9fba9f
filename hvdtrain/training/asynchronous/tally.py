"""What workers counted, added up."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.backends.protocol import Future
from hvdtrain.training.objective.metrics import Figure, MetricSet

States = Sequence[Sequence[Any]]
"""What the variables of each metric hold after one batch."""


class Tally:
    """Metrics over the batches of several calls, in float64 until somebody asks.

    Args:
        metrics: gives the values; nobody else may count in them.
    """

    def __init__(self, metrics: MetricSet) -> None:
        self._metrics = metrics
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._sums: list[list[np.ndarray]] | None = None
        self._pending: list[Future] = []

    def add(self, later: Future) -> None:
        """Count the `metrics` that a call returns, once it has run."""
        self._pending.append(later)

    def count(self, states: States) -> None:
        """Count what one batch came to."""
        wide = [[np.asarray(value, np.float64) for value in state] for state in states]
        if self._sums is not None:
            wide = [
                [a + b for a, b in zip(one, other, strict=True)] for one, other in zip(self._sums, wide, strict=True)
            ]
        self._sums = wide

    def take_up(self, sums: Mapping[str, Sequence[Any]]) -> None:
        """Begin with what `sums` returned."""
        self._metrics.take_up(sums)
        self._sums = [[v.numpy().astype(np.float64) for v in bound.metric.variables] for bound in self._metrics.bound]

    def sums(self) -> dict[str, list[Any]]:
        """Return the variables of each metric by its name, after waiting for what was scheduled."""
        self.results()
        bound = self._metrics.bound
        return {each.name: [variable.numpy().tolist() for variable in each.metric.variables] for each in bound}

    def results(self) -> dict[str, Figure]:
        """Return each metric's value over what was counted, after waiting for it."""
        for later in self._pending:
            self.count(later.fetch()["metrics"])
        self._pending.clear()
        self._metrics.hold(self._sums)
        return self._metrics.results()
