"""Local steps in one process: the outer optimizer by its formula, with learning rates that a schedule changes."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import SingleBackend
from hvdtrain.runtime.session import current
from hvdtrain.training.options import step_options
from hvdtrain.training.step.contract import LocalGradients
from hvdtrain.training.step.loss_terms import LEAST_WEIGHT
from hvdtrain.training.trainer import Trainer
from hvdtrain.training.update_rules.local_sgd import LocalUpdate

pytestmark = pytest.mark.usefixtures("session")


@pytest.fixture(autouse=True)
def _local_steps_of_one_replica(monkeypatch):
    monkeypatch.setattr("hvdtrain.training.update_rules.select.is_alone", lambda backend: False)


PERIOD, STEPS = 4, 16
RATES = {
    "down to 0": keras.optimizers.schedules.CosineDecay(0.1, STEPS),
    "0 at the end of a period": keras.optimizers.schedules.PiecewiseConstantDecay([6, 7], [0.1, 0.0, 0.05]),
    "another in each period": keras.optimizers.schedules.PiecewiseConstantDecay([3, 7, 11], [0.1, 0.05, 0.2, 0.01]),
}


def trained(rate, **options):
    """Train a weight of 1 towards 0, at a gradient of 2 w; return it."""
    kernel = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), kernel])
    trainer = Trainer(model, keras.optimizers.SGD(rate), "mse", local_steps=PERIOD, **options)
    data = np.ones((4 * STEPS, 1), "float32"), np.zeros((4 * STEPS, 1), "float32")
    trainer.fit(data, batch=4, shuffle=False, verbose=False)
    return model.get_weights()[0].item()


def slowmo(rate, *, momentum, slow=1.0, delay=0, blend=0.0):
    """Return the weight by algorithm 1 of Wang et al., whose average arrives `delay` steps late."""
    w = anchor = 1.0
    velocity = 0.0
    sent = ()
    for step in range(STEPS):
        w -= float(rate(step)) * 2 * w
        if step % PERIOD == PERIOD - 1:
            sent = anchor - w, float(rate(step))
        if sent and step % PERIOD == (PERIOD - 1 + delay) % PERIOD:
            (moved, gamma), sent = sent, ()
            anchor -= slow * (gamma * momentum * velocity + moved)
            velocity = momentum * velocity + (moved / gamma if gamma else 0.0)
            w = blend * w + (1 - blend) * anchor
    if sent:  # the end of the epoch waits for it, and averages what came after
        moved, gamma = sent
        anchor -= slow * (gamma * momentum * velocity + moved)
        w = blend * w + (1 - blend) * anchor
    return w


@pytest.mark.parametrize("name", RATES)
def test_slowmo_takes_the_learning_rate_of_its_local_steps(name):
    rate = RATES[name]
    assert trained(rate, outer_optimizer="slowmo", outer_momentum=0.0) == pytest.approx(trained(rate), rel=0, abs=1e-6)
    options = {"outer_optimizer": "slowmo", "outer_momentum": 0.6, "outer_learning_rate": 0.8}
    assert trained(rate, **options) == pytest.approx(slowmo(rate, momentum=0.6, slow=0.8), rel=0, abs=1e-6)


def test_a_delayed_average_has_the_learning_rate_of_the_steps_that_it_averages():
    rate = RATES["another in each period"]
    late = partial(trained, rate, outer_optimizer="slowmo", outer_momentum=0.6, average_delay=2, average_blend=0.5)
    assert late() == pytest.approx(slowmo(rate, momentum=0.6, delay=2, blend=0.5), rel=0, abs=1e-6)


def stepping(optimizer):
    """Return a model and a step of it with a number of samples, whose gradients are 1."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    rule = LocalUpdate(SingleBackend(current()), model, optimizer, step_options({"local_steps": 100}))

    @tf.function(autograph=False)
    def step(samples):
        gradients = [tf.ones(v.shape) * samples for v in model.trainable_variables]
        rule.update(LocalGradients(gradients, tf.stack([0.0, samples, 0.0]), tf.constant(2.0), False), measure=False)

    return model, step


@pytest.mark.parametrize("weight", [0.0, LEAST_WEIGHT])
def test_a_replica_without_samples_or_whose_samples_weigh_nothing_takes_no_step(weight):
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.1, use_ema=True, ema_momentum=0.5)
    model, step = stepping(optimizer)
    step(tf.constant(1.0))
    _, *before = state = [np.array(v) for v in (*optimizer.variables, *model.weights)]
    step(tf.constant(weight))
    count, *after = [np.array(v) for v in (*optimizer.variables, *model.weights)]
    np.testing.assert_equal(after, before)
    assert (state[0], count) == (1, 2), "the schedule goes on with the others"
    step(tf.constant(1.0))
    assert any(np.any(np.array(v) != old) for v, old in zip(model.weights, after[-2:], strict=True))


def test_an_average_of_weights_begins_at_them_without_samples_too():
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
    model, step = stepping(optimizer)
    kernel, bias = before = [np.array(v) for v in model.trainable_variables]
    step(tf.constant(0.0))
    averages = optimizer.variables[2:4]
    np.testing.assert_array_equal([np.array(v).item() for v in averages], [kernel.item(), bias.item()])
    step(tf.constant(1.0))
    for average, old, new in zip(averages, before, model.trainable_variables, strict=True):
        np.testing.assert_allclose(average, 0.5 * old + 0.5 * np.array(new))


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer")
def test_schedules_of_several_optimizers_go_on_without_samples():
    kinds = keras.optimizers
    several = kinds.MultiOptimizer(kinds.OptimizerMap(kinds.Adam(), {".*/bias": kinds.SGD()}))
    _, step = stepping(several)
    for samples in (1.0, 0.0, 1.0):
        step(tf.constant(samples))
    assert [int(each.iterations) for each in (several, *several.optimizers)] == [3, 3, 3]
