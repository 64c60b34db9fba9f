"""Which optimizers change rows of a table without a gradient: servers send workers the others alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.optim.optimizers import decaying_weights_only
from hvdtrain.optim.schedules import learning_rate_schedule
from hvdtrain.training.update_rules.rows_alone import changes_rows_alone


class Terse(keras.optimizers.SGD):
    """Has an argument that its configuration lacks."""

    def __init__(self, rate):
        super().__init__(rate)


class Shrinking(keras.optimizers.SGD):
    """Shrinks all rows by what is set after it was made, which its configuration lacks."""

    by = 0.0

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, self.by * tf.convert_to_tensor(variable))


def warming_up(**options):
    return keras.optimizers.SGD(learning_rate_schedule(1e-3, 10**8, warmup_steps=10**7), **options)


@pytest.mark.parametrize(
    ("make", "alone"),
    [
        (lambda: keras.optimizers.SGD(0.1), True),
        (lambda: keras.optimizers.Adagrad(0.1), True),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), False),
        (lambda: keras.optimizers.SGD(0.1, weight_decay=0.1), False),
        (lambda: keras.optimizers.Adam(0.1), False),
        (lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2), False),
        (lambda: Terse(0.1), True),
        (lambda: warming_up(), True),
        (lambda: warming_up(momentum=0.9), False),
        (lambda: keras.optimizers.SGD(0.0, momentum=0.9), False),
    ],
)
def test_a_trial_shows_what_an_optimizer_changes(make, alone):
    assert changes_rows_alone(make()) is alone


def test_what_is_set_on_an_optimizer_counts():
    optimizer = Shrinking(0.1)
    assert changes_rows_alone(optimizer)
    optimizer.by = 0.5
    assert not changes_rows_alone(optimizer)


def test_a_table_that_does_not_decay_changes_by_rows():
    optimizer = decaying_weights_only(keras.optimizers.SGD(0.1, weight_decay=0.1))
    assert changes_rows_alone(optimizer, decayed=False)
    assert not changes_rows_alone(optimizer, decayed=True)


def test_a_trial_leaves_the_optimizer_as_it_was():
    optimizer, table = keras.optimizers.Adagrad(0.1, weight_decay=0.1), keras.Variable(np.ones((3, 2), "float32"))
    optimizer.exclude_from_weight_decay(var_list=[table])
    optimizer.apply([tf.ones([3, 2])], [table])
    before, names = [np.array(v) for v in optimizer.variables], sorted(vars(optimizer))
    changes_rows_alone(optimizer)
    assert sorted(vars(optimizer)) == names
    for variable, value in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    optimizer.apply([tf.zeros([3, 2])], [table])
    np.testing.assert_array_equal(optimizer.iterations, 2)
    np.testing.assert_array_equal(optimizer.variables[2], before[2])
