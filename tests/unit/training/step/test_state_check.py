"""States of users' layers that ranks update from their own samples."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import as_batch
from hvdtrain.training.step.checks import check_states, check_untracked

X = np.random.default_rng(0).standard_normal((7, 3)).astype("float32")


class Watching(keras.layers.Layer):
    """Keeps `of(inputs)`, or what `joined` makes of it and the state before."""

    def __init__(self, of, joined=lambda _, now: now, aggregation=None):
        super().__init__()
        self.of, self.joined, self.asked = of, joined, aggregation

    def build(self, shape):
        self.seen = self.add_weight(shape=(), trainable=False, name="seen", aggregation=self.asked)

    def call(self, inputs, training=False):
        if training:
            self.seen.assign(self.joined(self.seen.value, self.of(inputs)))
        return inputs


def largest(inputs):
    return tf.reduce_max(tf.abs(inputs))


def check(*layers):
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    before = [variable.numpy() for variable in model.variables]
    batch = as_batch(tf.constant(X), 1.0, len(X))
    try:
        check_states(model, batch, lambda batch: model(batch.inputs, training=True))
    finally:
        for variable, value in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Watching(tf.reduce_mean),
        lambda: Watching(tf.reduce_mean, lambda before, now: 0.9 * before + 0.1 * now),
        lambda: Watching(lambda inputs: tf.constant(3.0), lambda before, now: before + now),
        lambda: Watching(largest, tf.maximum, aggregation="only_first_replica"),
        lambda: Watching(tf.math.reduce_variance, aggregation="mean"),
        keras.layers.BatchNormalization,
        lambda: Watching(lambda inputs: largest(inputs) + tf.random.normal([])),  # nothing to compare
    ],
)
def test_a_mean_may_be_averaged_and_what_the_layer_asks_for_is_done(layer):
    check(layer())


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Watching(largest, tf.maximum),
        lambda: Watching(tf.reduce_sum, lambda before, now: before + now),
        lambda: Watching(tf.math.reduce_variance),
    ],
)
def test_other_states_are_refused_by_name(layer):
    with pytest.raises(ConfigError, match=r"Watching 'watching\S*' updates \S*seen from the samples of its rank"):
        check(layer())


class Untracked(keras.layers.Layer):
    """Keeps `of(inputs)`, or the number of its calls, in a variable of which Keras does not know."""

    def __init__(self, of):
        super().__init__()
        self.of = of
        self.seen = [tf.Variable(0.0, trainable=False)]

    def call(self, inputs, training=False):
        if training:
            self.seen[0].assign_add(self.of(inputs))
        return inputs


@pytest.mark.parametrize("of", [largest, lambda inputs: 1.0])
def test_untracked_states_of_samples_are_refused(of):
    """A count of calls is the same on all ranks."""
    layer = Untracked(of)
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    batch = as_batch(tf.constant(X), 1.0, len(X))
    context = pytest.raises(ConfigError, match=r"updates 'seen/0' from the samples of its rank, .*add_weight")
    with context if of is largest else nullcontext():
        check_untracked(model, batch, lambda batch: model(batch.inputs, training=True))
    assert float(layer.seen[0]) == 0.0
