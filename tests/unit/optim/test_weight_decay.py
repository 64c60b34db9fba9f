import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.optim import OptimConfig
from hvdtrain.optim.optimizers import build_optimizer, decays, known_optimizers

RATE, DECAY = 0.1, 0.5


@pytest.fixture(scope="module")
def model():
    """Layers whose biases and normalization parameters have one dim, and some with two."""
    layers = keras.layers
    inputs = keras.Input((6, 8))
    x = layers.Dense(8, name="beta")(inputs)  # the layer's name says nothing about its kernel
    x = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.LayerNormalization(axis=[1, 2])(x)
    x = layers.BatchNormalization()(layers.Conv1D(8, 3, name="bias_free")(x))
    x = layers.GRU(4)(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def after_one_step(optimizer, model):
    """Take a step whose gradients are zero and back, and return (path, before, after) of every variable."""
    before = [v.numpy() for v in model.trainable_variables]
    optimizer.build(model.trainable_variables)
    optimizer.apply([np.zeros(v.shape, "float32") for v in model.trainable_variables], model.trainable_variables)
    after = [v.numpy() for v in model.trainable_variables]
    for variable, value in zip(model.trainable_variables, before, strict=True):
        variable.assign(value)
    return [(v.path, old, new) for v, old, new in zip(model.trainable_variables, before, after, strict=True)]


def ones(model):
    for variable in model.trainable_variables:
        variable.assign(np.ones(variable.shape, "float32"))


def optimizer_named(name, **options):
    return build_optimizer(OptimConfig(name, learning_rate=RATE, **options), 10, 64)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("kernel", (3, 3), True),
        ("embeddings", (9, 3), True),
        ("kernel", (3, 3, 1, 1), True),
        ("scale", (3,), False),  # of one dim, whatever its name
        ("kernel", (), False),
        ("bias", (2, 4), False),  # a bias, however many dims it has
        ("gamma", (6, 8), False),
        ("bias_free", (3, 3), True),
        ("beta_kernel", (3, 3), True),
    ],
)
def test_a_weight_is_known_by_its_dims_and_its_name(name, shape, expected):
    value = np.zeros(shape, "float32")
    assert decays(keras.Variable(value, name=name)) is expected
    assert decays(tf.Variable(value, name=name)) is expected
    assert decays(tf.Variable(value, name=f"gamma/{name}")) is expected


@pytest.mark.parametrize("within", [False, True], ids=["plain", "loss scaling"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "muon", "lars"])
def test_weights_decay_and_biases_and_normalizations_do_not(model, name, within):
    ones(model)
    optimizer = optimizer_named(name, weight_decay=DECAY)
    seen = set()
    for path, before, after in after_one_step(
        keras.optimizers.LossScaleOptimizer(optimizer) if within else optimizer, model
    ):
        kind = path.split("/")[-1]
        weight = kind in ("kernel", "recurrent_kernel")
        expected = 1 - RATE * DECAY if weight else 1.0
        assert after == pytest.approx(before * expected, rel=1e-6), path
        seen.add(kind)
    assert seen == {"kernel", "recurrent_kernel", "bias", "gamma", "beta"}


def test_an_optimizers_own_decay_skips_biases_too(model):
    ones(model)
    moved = {p.split("/")[-1]: (a != b).any() for p, b, a in after_one_step(optimizer_named("adamw"), model)}
    assert moved == {"kernel": True, "recurrent_kernel": True, "bias": False, "gamma": False, "beta": False}


@pytest.mark.parametrize("options", [{"weight_decay": 0.0}, {"optimizer_args": {"weight_decay": 0.0}}])
def test_an_optimizers_own_decay_can_be_turned_off(model, options):
    ones(model)
    assert all((a == b).all() for _, b, a in after_one_step(optimizer_named("adamw", **options), model))


@pytest.mark.parametrize("name", known_optimizers())
def test_the_option_reaches_every_optimizer(name):
    assert optimizer_named(name, weight_decay=DECAY).weight_decay == DECAY
    expected = {"adamw": 0.004, "muon": 0.004, "lars": 0.0}.get(name)
    assert optimizer_named(name).weight_decay == expected


# -- in a user's own loop --


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, hvdtrain.LossScaleOptimizer], ids=["plain", "scaled"])
def test_a_users_optimizer_decays_weights_only_if_it_is_told_to(model, wrap):
    ones(model)
    optimizer = wrap(keras.optimizers.SGD(RATE, weight_decay=DECAY))
    assert hvdtrain.decaying_weights_only(optimizer) is optimizer
    moved = {p.split("/")[-1]: (a != b).any() for p, b, a in after_one_step(optimizer, model)}
    assert moved == {"kernel": True, "recurrent_kernel": True, "bias": False, "gamma": False, "beta": False}


def test_a_built_optimizer_is_told_too_late():
    optimizer = keras.optimizers.SGD(RATE, weight_decay=DECAY)
    optimizer.build([keras.Variable(np.ones(3, "float32"), name="bias")])
    with pytest.raises(ConfigError, match="is built: say what decays before its first use"):
        hvdtrain.decaying_weights_only(optimizer)
