"""What scripts for Keras 2 do with an optimizer, on a wrapped optimizer of Keras 3."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.horovod.keras as hvd
from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.flavour.keras3_optimizers import Keras2Names, Refused

K = tf.keras.backend


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    hvd.init()


def inside(momentum=0.0):
    return hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum)))


def outside(momentum=0.0):
    return keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum)))


def alone(momentum=0.0):
    return hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum))


KINDS = pytest.mark.parametrize("kind", [alone, inside, outside])


@KINDS
def test_the_learning_rate_by_its_old_name(kind):
    optimizer = kind()
    assert float(K.get_value(optimizer.lr)) == 0.5
    optimizer.lr = 0.25
    assert float(optimizer.learning_rate) == 0.25
    K.set_value(optimizer.lr, 0.125)
    assert optimizer.lr.numpy() == 0.125
    optimizer.lr.assign(optimizer.lr * 2)
    assert float(optimizer.learning_rate) == 0.25
    assert float(optimizer._decayed_lr(tf.float32)) == 0.25
    optimizer._set_hyper("learning_rate", 1.0)
    assert float(optimizer._get_hyper("lr", tf.float64)) == 1.0


def test_a_rate_that_is_assigned_is_the_rate_of_the_next_step():
    optimizer, variable = alone(), keras.Variable(np.zeros(1))
    step = tf.function(lambda: optimizer.apply_gradients([(tf.ones(1), variable)], name="step"))
    step()
    optimizer.lr = 2.0
    step()
    assert variable.numpy() == -2.5


def test_a_schedule_is_read_and_cannot_be_assigned():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)))
    assert float(optimizer.lr) == 0.5
    with pytest.raises(TypeError, match="not settable"):
        optimizer.lr = 0.1


@KINDS
def test_weights_go_from_one_optimizer_to_another(kind):
    variable = keras.Variable(np.zeros(3))
    first, second = kind(0.9), kind(0.9)
    first.build([variable])
    first.lr = 0.125
    first.iterations.assign(5)
    with pytest.raises(ConfigError, match=r"optimizer's \d variables.*Received: \d arrays.*optimizer\.build"):
        second.set_weights(first.get_weights())
    second._create_all_weights([variable])
    second.set_weights(first.get_weights())
    assert int(second.iterations) == 5
    assert float(second.lr) == 0.125
    assert len(second.weights) == len(second.variables()) == len(second.get_weights())
    with pytest.raises(ConfigError, match="Received: 1 arrays"):
        second.set_weights([1])


@KINDS
def test_minimize(kind):
    variable = keras.Variable(np.ones(3))
    optimizer = kind()

    def loss():
        return tf.reduce_sum(variable.value * variable.value)

    optimizer.minimize(loss, [variable])
    np.testing.assert_array_equal(variable.numpy(), 0.0)
    variable.assign(np.ones(3))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            value = loss()
        optimizer.minimize(value, lambda: [variable], tape=tape)

    step()
    np.testing.assert_array_equal(variable.numpy(), 0.0)
    assert int(optimizer.iterations) == 2
    with pytest.raises(ConfigError, match="`tape` is required"):
        optimizer.minimize(tf.constant(1.0), [variable])


@KINDS
def test_a_checkpoint_of_tensorflow_restores_the_state(kind, tmp_path):
    """tf.train.Checkpoint looks at an optimizer's attributes to find slots."""
    variable, other = keras.Variable(np.ones(3)), keras.Variable(np.ones(3))
    saved, restored = kind(0.9), kind(0.9)
    saved.minimize(lambda: tf.reduce_sum(variable.value), [variable])
    restored.build([other])
    path = tf.train.Checkpoint(optimizer=saved).save(str(tmp_path / "state"))
    tf.train.Checkpoint(optimizer=restored).restore(path).assert_existing_objects_matched()
    assert int(restored.iterations) == 1
    for mine, theirs in zip(restored.get_weights(), saved.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


REFUSED = sorted(name for name, value in vars(Keras2Names).items() if isinstance(value, Refused))


@pytest.mark.parametrize("name", REFUSED)
def test_what_keras_3_has_no_counterpart_for_is_refused_in_words(name):
    for optimizer in (alone(), inside(), outside()):
        assert not hasattr(optimizer, name)
        for access in (lambda one=optimizer: getattr(one, name), lambda one=optimizer: setattr(one, name, 1)):
            with pytest.raises(AttributeError, match=f"no {name}. [A-Z]"):
                access()


def test_a_constant_of_the_compiled_step_is_not_assigned_in_silence():
    optimizer, variable = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.9)), keras.Variable(np.zeros(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.momentum = 0.5
    tf.function(lambda: optimizer.apply_gradients([(tf.ones(1), variable)]))()
    with pytest.warns(UserWarning, match=r"momentum.*compile the model again"):
        optimizer.momentum = 0.25
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.momentum = 0.25
        optimizer.lr = 0.1


def test_iterations_are_assigned_as_in_keras_2():
    optimizer = alone()
    optimizer.iterations = 7
    assert int(optimizer.iterations) == 7


class Custom(keras.optimizers.SGD):
    """An optimizer that a script defines."""


def test_a_model_is_loaded_with_a_function_that_wraps_its_optimizer(tmp_path):
    """As Horovod documents it; other functions among the custom objects stay what they are."""

    def loss(targets, outputs):
        return tf.reduce_mean(tf.square(targets - outputs))

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(Custom(0.25, momentum=0.5)), loss)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    model.save(tmp_path / "model.keras")
    objects = {"Custom": lambda **config: hvd.DistributedOptimizer(Custom(**config)), "loss": loss}
    loaded = hvd.load_model(str(tmp_path / "model.keras"), custom_objects=objects)
    assert isinstance(loaded.optimizer, Custom)
    assert loaded.optimizer.distribution is not None
    for mine, theirs in zip(loaded.optimizer.get_weights(), model.optimizer.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_get_gradients_belongs_to_graphs():
    with pytest.raises(AttributeError, match=r"no get_gradients.*compute_gradients"):
        alone().get_gradients(tf.constant(1.0), [])
