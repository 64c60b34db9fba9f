"""Synthetic clicks on advertisements: numeric and categorical features shaped like Criteo's, from a hidden model.

A few categories of each field are frequent and most are rare, as in real logs. Clicks are drawn from a model with
weights for the numbers and a hidden vector for each category, which enter by themselves and as pairwise products. So
there is something to learn, and a bound on how well it can be learned.
"""

from typing import Any

import numpy as np

from hvdtrain.config.errors import ConfigError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.splits import DataSplits

HIDDEN = 4
"""Size of a category's hidden vector."""
SPREAD, BASE = 2.0, -1.2
"""Standard deviation and mean of the log odds: three in ten rows are clicked."""
POWER = 1.1
"""The r-th most frequent category has a frequency proportional to r^-1.1."""


def load(*, samples: int = 131072, rows: int = 1000, numbers: int = 13, fields: int = 26) -> DataSplits:
    """Return rows {"numeric": float32 [numbers], "categorical": int32 [fields]} with the label 1 where clicked.

    Args:
        samples: training rows; validation has an eighth as many.
        rows: number of categories of each field.
        numbers: numeric columns, of normal noise.
        fields: categorical columns.

    Raises:
        ConfigError: sizes that are not positive.
    """
    if min(samples, rows, numbers, fields) < 1:
        raise ConfigError(
            "synthetic_clicks needs positive sizes. "
            f"Received: samples={samples}, rows={rows}, numbers={numbers}, fields={fields}."
        )
    rng = np.random.default_rng(0)
    held = max(1, samples // 8)
    inputs = drawn_rows(rng, count=samples + held, rows=rows, numbers=numbers, fields=fields)
    labels = (rng.random(samples + held) < 1 / (1 + np.exp(-log_odds(rng, inputs, rows)))).astype(np.int32)

    def part(rows: slice, name: str) -> ArraySource:
        return ArraySource(
            ({key: array[rows] for key, array in inputs.items()}, labels[rows]), f"synthetic_clicks ({name})"
        )

    return DataSplits(
        train=part(slice(0, samples), "training"),
        validation=part(slice(samples, None), "validation"),
        sample_shape={"numeric": (numbers,), "categorical": (fields,)},
        classes=2,
    )


def drawn_rows(rng: np.random.Generator, count: int, rows: int, numbers: int, fields: int) -> dict[str, Any]:
    """Return `count` rows {"numeric": [count, numbers], "categorical": [count, fields]}."""
    chances = np.arange(1, rows + 1) ** -POWER
    ranks = rng.choice(rows, (count, fields), p=chances / chances.sum())
    # The frequent categories differ by field, and are not the low numbers.
    numbering = np.stack([rng.permutation(rows) for _ in range(fields)])
    return {
        "numeric": rng.standard_normal((count, numbers), dtype=np.float32),
        "categorical": numbering[np.arange(fields), ranks].astype(np.int32),
    }


def log_odds(rng: np.random.Generator, inputs: dict[str, Any], rows: int) -> np.ndarray:
    """Return the log odds [count] of a click by a hidden model that `rng` draws."""
    numeric, categorical = inputs["numeric"], inputs["categorical"]
    fields = categorical.shape[1]
    total, squares = np.zeros((2, len(numeric), HIDDEN))
    for field in range(fields):
        vectors = rng.standard_normal((rows, HIDDEN))[categorical[:, field]]
        total += vectors
        squares += vectors**2
    numbers = _standard(numeric @ rng.standard_normal(numeric.shape[1]))
    alone = _standard(total @ rng.standard_normal(HIDDEN))
    pairs = _standard((total**2 - squares).sum(axis=1))
    return BASE + SPREAD * _standard(numbers + 2 * alone + pairs)


def _standard(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / max(float(values.std()), 1e-12)
