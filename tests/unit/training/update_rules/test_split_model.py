"""An overflow on one rank reaches all, in a gradient that has elements."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.training.update_rules.split_model import overflowing_together

NOTHING = tf.zeros([0, 4])
"""The gradient of a table that another rank holds."""
FINITE, INFINITE = tf.constant(1.0, tf.float64), tf.constant(np.inf, tf.float64)


@pytest.mark.parametrize("norm", [FINITE, INFINITE])
def test_the_smallest_gradient_with_elements_takes_the_overflow(norm):
    large, small = tf.ones([3, 3]), tf.ones([2])
    found = overflowing_together([None, large, NOTHING, small], norm)
    assert found[0] is None
    assert found[1] is large
    assert found[2] is NOTHING
    np.testing.assert_array_equal(found[3], [1.0, 1.0] if norm is FINITE else [np.nan] * 2)


def test_a_rank_that_trains_nothing_is_refused():
    with pytest.raises(ConfigError, match="every rank must hold a weight that is trained"):
        overflowing_together([None, NOTHING], INFINITE)
