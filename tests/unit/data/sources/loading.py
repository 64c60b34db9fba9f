"""Loading sources in tests, and what they hold."""

import re

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import DataError
from hvdtrain.data.registry import load_splits


def load(source, path, **arguments):
    return load_splits(DataConfig(source, {"path": str(path), **arguments}))


def arrays(source, splits=None):
    """All samples of a source, after what `splits` does to them last."""
    elements = source.gather(tf.range(source.size))
    if splits is not None and splits.finish is not None:
        elements = splits.finish(*elements)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), elements)


def refused(source, path, cause, error=DataError, **arguments):
    with pytest.raises(error, match=re.escape(cause)):
        load(source, path, **arguments)


def random(*shape, seed=0):
    return np.random.default_rng(seed).random(shape, np.float32)


def parts_of(splits, index=1):
    return arrays(splits.train)[index].tolist(), arrays(splits.validation)[index].tolist()
