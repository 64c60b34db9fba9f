"""Sequences of a random Markov chain: a language that a model can learn, of any size."""

import numpy as np

from hvdtrain.config.errors import ConfigError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.splits import DataSplits

CHANCES = (0.7, 0.1, 0.1, 0.1)
"""Probabilities of a token's possible successors; the first is the best accuracy that a model can reach."""


def load(*, length: int = 128, vocabulary: int = 8192, samples: int = 2048) -> DataSplits:
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
