"""Synthetic samples, on every machine and of any size: images of noise, a Markov chain of tokens, clicks.

The tokens of a random Markov chain are a language that a model can learn. Clicks on advertisements have numeric and
categorical features shaped like Criteo's: a few categories of each field are frequent and most are rare. They are drawn
from a model with weights for the numbers and a hidden vector for each category, which enter by themselves and as
pairwise products, so there is something to learn, and a bound on how well it can be learned.
"""

from typing import Any

import numpy as np

from hvdtrain.config.errors import ConfigError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.source import DataSplits

CHANCES = (0.7, 0.1, 0.1, 0.1)
"""Probabilities of a token's possible successors; the first is the best accuracy that a model can reach."""
HIDDEN = 4
"""Size of a category's hidden vector."""
SPREAD, BASE = 2.0, -1.2
"""Standard deviation and mean of the log odds: three in ten rows are clicked."""
POWER = 1.1
"""The r-th most frequent category has a frequency proportional to r^-1.1."""


def load_images(
    *, size: int = 32, channels: int = 3, classes: int = 10, samples: int = 4096, nan_at: int = -1
) -> DataSplits:
    """Return `samples` images [size, size, channels] of normal noise and uniform labels.

    Args:
        size: height and width in pixels.
        channels: channels of a pixel.
        classes: number of labels.
        samples: training samples; validation has an eighth as many.
        nan_at: number of a training sample whose first pixel is NaN, to test how a run reports it; -1: none.
    """
    rng = np.random.default_rng(0)

    def part(count: int, name: str) -> ArraySource:
        images = rng.standard_normal((count, size, size, channels), dtype=np.float32)
        if name == "training" and 0 <= nan_at < count:
            images[nan_at, 0, 0, 0] = np.nan
        labels = rng.integers(0, classes, count, dtype=np.int32)
        return ArraySource((images, labels), f"synthetic ({name})")

    return DataSplits(
        train=part(samples, "training"),
        validation=part(max(1, samples // 8), "validation"),
        sample_shape=(size, size, channels),
        classes=classes,
    )


def load_tokens(*, length: int = 128, vocabulary: int = 8192, samples: int = 2048) -> DataSplits:
    """Return `samples` sequences of tokens [length], each with the tokens that follow as its targets [length].

    Args:
        length: tokens of a sequence.
        vocabulary: number of different tokens.
        samples: training sequences; validation has an eighth as many, of the same chain.

    Raises:
        ConfigError: sizes that are too small for a chain.
    """
    if length < 1 or samples < 1 or vocabulary < len(CHANCES):
        raise ConfigError(
            f"synthetic_tokens needs a positive length and samples, and a vocabulary of at least {len(CHANCES)}. "
            f"Received: length={length}, vocabulary={vocabulary}, samples={samples}."
        )
    rng = np.random.default_rng(0)
    # A permutation and its shifts, so that tokens are equally frequent and the successors of one are distinct.
    order = rng.permutation(vocabulary).astype(np.int32)
    successors = np.stack([np.roll(order, shift) for shift in range(len(CHANCES))], axis=1)

    def part(count: int, name: str) -> ArraySource:
        tokens = walks(successors, rng, count, length + 1)
        return ArraySource((tokens[:, :-1], tokens[:, 1:]), f"synthetic_tokens ({name})")

    return DataSplits(
        train=part(samples, "training"),
        validation=part(max(1, samples // 8), "validation"),
        sample_shape=(length,),
        classes=vocabulary,
    )


def walks(successors: np.ndarray, rng: np.random.Generator, count: int, length: int) -> np.ndarray:
    """Return `count` random walks [count, length] over the chain `successors` [tokens, choices]."""
    tokens = np.empty((count, length), np.int32)
    tokens[:, 0] = rng.integers(0, len(successors), count)
    for place in range(1, length):
        choice = rng.choice(len(CHANCES), count, p=CHANCES)
        tokens[:, place] = successors[tokens[:, place - 1], choice]
    return tokens


def load_clicks(*, samples: int = 131072, rows: int = 1000, numbers: int = 13, fields: int = 26) -> DataSplits:
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
