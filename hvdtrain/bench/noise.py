"""Medians and spread, and when noise forbids a ratio; pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_ROUNDS = 3
WIDEST = 0.10
"""Interquartile range of a ratio, relative to its median, beyond which it is not reported."""
MOST_FOREIGN = 0.25
"""Cores that other programs may keep busy meanwhile, in the median over the rounds."""


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles (linear between the values)."""

    low: float
    median: float
    high: float

    @property
    def width(self) -> float:
        """Interquartile range relative to the median."""
        return (self.high - self.low) / self.median if self.median else float("inf")


@dataclass(frozen=True)
class Refused:
    """A ratio that is not reported, with the reason."""

    reason: str


def spread(values: Sequence[float]) -> Spread:
    """Return the median and quartiles of at least one value."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return Spread(float(low), float(median), float(high))


def ratio(over: Sequence[float], under: Sequence[float], foreign: Sequence[float] = ()) -> Spread | Refused:
    """Return the ratio of two sides that took turns, formed per round, or the reason to refuse it.

    Args:
        over: numerators, one per round.
        under: denominators, of the same rounds.
        foreign: cores that other programs kept busy, for each launch of either side.
    """
    rounds = min(len(over), len(under))
    if rounds < LEAST_ROUNDS:
        return Refused(f"{rounds} round{'s' * (rounds != 1)}: fewer than {LEAST_ROUNDS} do not tell how noisy it was")
    if len(foreign) and (taken := float(np.median(foreign))) > MOST_FOREIGN:
        return Refused(f"too noisy: other programs took {taken:.2f} cores meanwhile")
    found = spread([a / b for a, b in zip(over, under, strict=False)])
    if found.width > WIDEST:
        return Refused(f"too noisy: its quartiles are {found.low:.3g} and {found.high:.3g}")
    return found
