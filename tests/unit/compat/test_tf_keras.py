"""What the face of Horovod takes for granted about Keras 2."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from hvdtrain.compat import tf_keras as compat
from hvdtrain.config.errors import CompatibilityError
from tests.unit.compat.contracts import Contracts

CONTRACTS = Contracts(compat, "tf_keras")
SGD, LEGACY = tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD


def stepped(kind, **options):
    optimizer, variable = kind(momentum=0.5, **options), tf.Variable([1.0, 2.0])
    optimizer.apply_gradients([(tf.ones([2]), variable)])
    return optimizer


@CONTRACTS.of(compat.BatchNormalizationByMoments)
def asks_for_moments():
    class Ones(compat.BatchNormalizationByMoments):
        def moments(self, inputs, axes, keep_dims, mask):
            mean, variance = super().moments(inputs, axes, keep_dims, mask)
            return mean * 0 + 1, variance * 0 + 1 - self.epsilon

    x = tf.random.normal([4, 3])
    np.testing.assert_allclose(Ones(fused=False)(x, training=True), x - 1, atol=1e-5)


@CONTRACTS.of(compat.compute_gradients)
def computes_gradients():
    for kind in (SGD, LEGACY):
        variable = tf.Variable(3.0)
        with tf.GradientTape() as tape:
            loss = variable * variable
        ((gradient, _),) = compat.compute_gradients(kind(), loss, [variable], None, tape)
        assert float(gradient) == 6.0
    variable = tf.Variable(3.0)
    ((gradient, _),) = compat.compute_gradients(LEGACY(), lambda: variable * 2.0, [variable], tf.constant(5.0), None)
    assert float(gradient) == 10.0


@CONTRACTS.of(compat.strategy_of)
def knows_its_strategy():
    compat.strategy_of(LEGACY())
    compat.strategy_of(SGD())


@CONTRACTS.of(compat.create_slots)
def creates_slots():
    for kind in (SGD, LEGACY):
        optimizer = kind(momentum=0.5)
        compat.create_slots(optimizer, [tf.Variable([1.0, 2.0])])
        assert [slot.shape for slot in compat.momentum_slots(optimizer)] == [(2,)]


@CONTRACTS.of(compat.momentum_slots)
def has_velocities():
    for kind in (SGD, LEGACY):
        assert compat.momentum_slots(kind(momentum=0.5)) == []
        assert len(compat.momentum_slots(stepped(kind))) == 1


@CONTRACTS.of(compat.rates_of)
def has_rates():
    rates = [float(tf.convert_to_tensor(rate)) for rate in compat.rates_of(stepped(LEGACY, learning_rate=0.25))]
    assert rates == [0.0, 0.25, 0.5]
    assert [float(rate) for rate in compat.rates_of(SGD(0.25))] == [0.25]


@CONTRACTS.of(compat.loss_scale_of)
def has_a_loss_scale():
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(SGD(), initial_scale=4.0)
    assert float(compat.loss_scale_of(optimizer)) == 4.0


@CONTRACTS.of(compat.is_within_loss_scale)
def knows_the_loss_scale_around_it():
    inner = LEGACY()
    assert not compat.is_within_loss_scale(inner)
    tf_keras.mixed_precision.LossScaleOptimizer(inner)
    assert compat.is_within_loss_scale(inner)


test_contract, test_every_function_has_a_contract = CONTRACTS.tests()


def test_moments_that_nobody_asks_for_are_refused(monkeypatch):
    """Batches would be normalized by the statistics of one replica."""
    monkeypatch.setattr(compat, "uses_attribute", lambda kind, name: False)
    with pytest.raises(CompatibilityError, match="asks _moments for mean and variance"):
        compat.BatchNormalizationByMoments(fused=False)(tf.ones([2, 3]))
