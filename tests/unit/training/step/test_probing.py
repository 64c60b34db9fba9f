"""What looking at the numbers of a batch leaves of a model's variables."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.training.step.probing import unchanged
from hvdtrain.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("session")
X = np.random.default_rng(0).standard_normal((8, 3)).astype("float32")


def built(**layer):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, **layer), keras.layers.BatchNormalization()])
    call = tf.function(lambda x: model(x, training=True), autograph=False).get_concrete_function(tf.constant(X))
    return model, call


def test_what_a_call_changed_is_restored_though_it_raises():
    model, call = built()
    before = model.get_weights()

    def call_and_fail():
        with unchanged(model, call.graph):
            call(tf.constant(X))
            assert abs(model.layers[1].moving_mean.numpy()).max() > 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call_and_fail()
    for value, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_frozen_weights_that_a_call_only_reads_are_not_copied():
    model, call = built(trainable=False)
    kernel = model.layers[0].kernel
    with unchanged(model, call.graph):
        kernel.assign(tf.ones_like(kernel))
    assert kernel.numpy().min() == 1, "it was restored from a copy"


class Failing(keras.Model):
    """Counts its steps, clips a weight and fails in the first batch."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.steps = self.add_weight(shape=(), trainable=False, name="steps")

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        self.steps.assign_add(1.0)
        self.layer.kernel.assign(self.layer.kernel / 2)
        with tf.GradientTape() as tape:
            error = tf.debugging.check_numerics(tf.reduce_mean((self(x) - y) ** 2), "of the first batch")
        self.optimizer.apply(tape.gradient(error, self.trainable_variables), self.trainable_variables)
        return {"loss": error}


def test_a_users_step_that_fails_in_the_first_batch_leaves_the_variables_as_they_were():
    model = Failing()
    model.compile("sgd")
    model(X)
    before = model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="of the first batch"):
        Trainer(model, accumulate=2).fit(X, np.full((8, 1), np.nan, "float32"), batch=8, verbose=0)
    for value, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
