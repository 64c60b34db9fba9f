import re

import numpy as np
import pytest

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.registry import load_splits
from hvdtrain.data.sources.synthetic import CHANCES


def tokens(**arguments):
    return load_splits(DataConfig("synthetic_tokens", arguments))


def arrays(source):
    return [part.numpy() for part in source.elements]


def test_targets_are_the_tokens_that_follow():
    splits = tokens(length=5, vocabulary=9, samples=16)
    for source, count in ((splits.train, 16), (splits.validation, 2)):
        x, y = arrays(source)
        assert (x.shape, y.shape, x.dtype, y.dtype) == ((count, 5), (count, 5), np.int32, np.int32)
        assert (x[:, 1:] == y[:, :-1]).all()
        assert min(x.min(), y.min()) >= 0
        assert max(x.max(), y.max()) < 9
    assert (splits.sample_shape, splits.classes) == ((5,), 9)


def test_the_next_token_can_be_learned_to_the_chance_of_the_first_successor():
    splits = tokens(length=50, vocabulary=20, samples=1600)
    x, y = arrays(splits.train)
    counts = np.zeros((20, 20))
    np.add.at(counts, (x, y), 1)
    best = counts.argmax(axis=1)
    held_x, held_y = arrays(splits.validation)  # the same chain, other walks
    assert (best[held_x] == held_y).mean() == pytest.approx(CHANCES[0], abs=0.02)  # 10,000 draws: 4 deviations
    # All tokens are as frequent: knowing that alone gains nothing.
    assert np.bincount(held_y.ravel(), minlength=20).max() / held_y.size < 0.08
    assert ((counts > 0).sum(axis=1) == len(CHANCES)).all()


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ({"length": 0}, "Received: length=0, vocabulary=8192, samples=2048."),
        ({"samples": 0}, "Received: length=128, vocabulary=8192, samples=0."),
        ({"vocabulary": 3}, "a vocabulary of at least 4. Received: length=128, vocabulary=3, samples=2048."),
        ({"lenght": 3}, "The dataset 'synthetic_tokens' takes no argument 'lenght'. Perhaps you meant: length."),
    ],
)
def test_sizes_that_make_no_chain_are_refused(arguments, cause):
    with pytest.raises(ConfigError, match=re.escape(cause)):
        tokens(**arguments)
