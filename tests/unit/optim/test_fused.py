"""Fused updates give what Keras' own give, and are what the steps use."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.optim.fused import fused_updates

SHAPE = (6, 4)
STEPS = 20
KINDS = {
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adam betas": lambda: keras.optimizers.Adam(0.01, beta_1=0.0, beta_2=0.99, epsilon=1e-3),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5, use_ema=True),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, STEPS)),
}
FUSED = {"ResourceApplyAdam", "ResourceApplyKerasMomentum", "ResourceApplyGradientDescent", "ResourceScatterSub"}


def gradients(kind, dtype):
    """One gradient a step: every second one is zero in a column, as a unit's that is not active."""
    random = np.random.default_rng(3)
    for step in range(STEPS):
        values = random.normal(size=SHAPE) + 0.5
        values[:, 0] *= step % 2
        if kind == "dense":
            yield tf.constant(values, dtype)
        else:
            rows = random.permutation(SHAPE[0])[:3]
            yield tf.IndexedSlices(tf.constant(values[rows], dtype), tf.constant(rows), tf.constant(SHAPE))


def trained(make, kind, dtype, *, fused, compiled=True):
    """The variable and the slots after STEPS steps."""
    variable = keras.Variable(np.random.default_rng(0).normal(size=SHAPE), dtype=dtype)
    optimizer = make()
    optimizer.build([variable])

    def step(gradient):
        if fused:
            with fused_updates(optimizer):
                optimizer.apply([gradient], [variable])
        else:
            optimizer.apply([gradient], [variable])

    run = tf.function(step) if compiled else step
    for gradient in gradients(kind, dtype):
        run(gradient)
    return [variable.numpy(), *(np.asarray(v) for v in optimizer.variables)]


def ops_of(step, *arguments):
    """Types of all ops of a compiled function, those of conditions' branches included."""
    definition = tf.function(step).get_concrete_function(*arguments).graph.as_graph_def()
    nodes = [*definition.node, *(node for f in definition.library.function for node in f.node_def)]
    return {node.op for node in nodes}


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("name", KINDS)
def test_fused_updates_are_keras_s_own_in_double_precision(name, kind):
    expected = trained(KINDS[name], kind, "float64", fused=False)
    for mine, theirs in zip(trained(KINDS[name], kind, "float64", fused=True), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("name", KINDS)
def test_fused_updates_are_keras_s_own_but_for_rounding(name, kind):
    mine = trained(KINDS[name], kind, "float32", fused=True)[0]
    theirs = trained(KINDS[name], kind, "float32", fused=False)[0]
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=3e-7 * np.abs(theirs).max())


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov"])
def test_sgd_is_keras_s_own_bit_for_bit(name):
    mine = trained(KINDS[name], "dense", "float32", fused=True)
    theirs = trained(KINDS[name], "dense", "float32", fused=False)
    assert all(np.array_equal(m, t) for m, t in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_an_eager_update_is_that_of_a_graph(name):
    eager = trained(KINDS[name], "dense", "float64", fused=True, compiled=False)
    for mine, theirs in zip(eager, trained(KINDS[name], "dense", "float64", fused=True), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-14)


def test_rows_that_are_given_twice_count_twice():
    variable = keras.Variable(np.zeros((3, 2)), dtype="float64")
    optimizer = keras.optimizers.SGD(1.0, momentum=0.9)
    optimizer.build([variable])
    with fused_updates(optimizer):
        optimizer.apply([tf.IndexedSlices(tf.ones((2, 2), tf.float64), tf.constant([1, 1]))], [variable])
    np.testing.assert_array_equal(variable.numpy(), [[0, 0], [-2, -2], [0, 0]])


class Halved(keras.optimizers.Adam):
    """Changes the rule."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate / 2)


class Renamed(keras.optimizers.Adam):
    """Changes nothing of it."""


def update_of(optimizer, dtype="float32", strategy=None):
    variable = keras.Variable(np.zeros(SHAPE), dtype=dtype)
    optimizer.build([variable])

    def step(gradient):
        with fused_updates(optimizer):
            optimizer.apply([gradient], [variable])

    on_replicas = step if strategy is None else lambda gradient: strategy.run(step, (gradient,))
    return ops_of(on_replicas, tf.TensorSpec(SHAPE, dtype))


def test_one_op_updates_a_variable():
    assert "ResourceApplyAdam" in update_of(keras.optimizers.Adam())
    assert "ResourceApplyAdam" in update_of(Renamed())
    assert "ResourceApplyKerasMomentum" in update_of(keras.optimizers.SGD(momentum=0.9))
    assert "ResourceApplyGradientDescent" in update_of(keras.optimizers.SGD())
    assert "ResourceApplyAdam" in update_of(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))


@pytest.mark.parametrize(
    "optimizer", [Halved(), keras.optimizers.Adam(amsgrad=True), keras.optimizers.Lion(), keras.optimizers.Nadam()]
)
def test_other_rules_stay_as_they_are(optimizer):
    assert not update_of(optimizer) & FUSED


def test_under_a_strategy_of_tf_distribute_all_stays_as_it_is():
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        assert not update_of(keras.optimizers.Adam(), strategy=strategy) & FUSED


def test_the_optimizer_that_exchanges_updates_by_one_op(session):
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam())
    variable = keras.Variable(np.zeros(SHAPE, "float32"))
    optimizer.build([variable])
    found = ops_of(lambda gradient: optimizer.apply([gradient], [variable]), tf.TensorSpec(SHAPE))
    assert "ResourceApplyAdam" in found


def test_the_trainer_updates_by_one_op(session):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    trainer = hvdtrain.Trainer(model, keras.optimizers.Adam(), "mse")
    data = np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32")
    handles = {}
    apply = tf.raw_ops.ResourceApplyAdam

    def counted(**arguments):
        handles[id(arguments["var"])] = arguments["var"]
        return apply(**arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.raw_ops, "ResourceApplyAdam", counted)
        trainer.fit(data, batch=8, verbose=False)
    assert len(handles) == 2
