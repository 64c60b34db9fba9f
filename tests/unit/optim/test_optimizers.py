import re

import keras
import numpy as np
import pytest

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.optim import OptimConfig
from hvdtrain.optim.optimizers import build_optimizer, known_optimizers

PEAK = 0.5


def built(config, total=10, batch=64):
    return build_optimizer(config, total, batch)


def moves_of(config, steps=3, batch=64):
    """How far each step of constant gradient 1 moves a scalar."""
    optimizer = built(config, batch=batch)
    variable = keras.Variable(np.zeros(1, "float32"))
    optimizer.build([variable])
    moves = []
    for _ in range(steps):
        before = float(variable[0])
        optimizer.apply([np.ones(1, "float32")], [variable])
        moves.append(before - float(variable[0]))
    return moves


def test_the_optimizer_follows_the_schedule():
    config = OptimConfig("sgd", learning_rate=PEAK, warmup_steps=2)
    assert moves_of(config) == pytest.approx([PEAK / 2, PEAK, PEAK])


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("name", known_optimizers())
def test_every_optimizer_that_is_offered_builds_with_its_defaults_and_moves_all_weights(name, schedule):
    optimizer = built(OptimConfig(name, learning_rate=0.1, schedule=schedule))
    random = np.random.default_rng(0)
    variables = [keras.Variable(random.normal(size=shape).astype("float32")) for shape in ((4, 3), (3,))]
    before = [variable.numpy() for variable in variables]
    optimizer.build(variables)
    for _ in range(3):
        optimizer.apply([random.normal(size=v.shape).astype("float32") for v in variables], variables)
    for variable, start in zip(variables, before, strict=True):
        assert np.isfinite(variable.numpy()).all()
        assert np.abs(variable.numpy() - start).min() > 1e-7
    assert int(optimizer.iterations) == 3


@pytest.mark.parametrize("name", known_optimizers())
def test_every_optimizer_that_is_offered_survives_saving(name):
    optimizer = built(OptimConfig(name, learning_rate=0.1, schedule="cosine", weight_decay=0.25))
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert again.get_config() == optimizer.get_config()
    assert again.weight_decay == 0.25


def test_arguments_reach_the_optimizer():
    config = OptimConfig("sgd", {"momentum": 0.9, "nesterov": True, "clipnorm": 1.0}, learning_rate=0.1)
    optimizer = built(config)
    assert type(optimizer) is keras.optimizers.SGD
    assert (optimizer.momentum, optimizer.nesterov, optimizer.clipnorm) == (0.9, True, 1.0)
    assert float(optimizer.learning_rate) == pytest.approx(0.1)


def test_muon_is_given_its_list_of_layers_and_one_decay():
    optimizer = built(OptimConfig("muon", {"exclude_layers": "head, logits"}, weight_decay=0.5))
    assert optimizer.exclude_layers == ["head", "logits"]
    assert (optimizer.weight_decay, optimizer.adam_weight_decay) == (0.5, 0.5)
    paths = {name: keras.Variable(np.ones((2, 2), "float32"), name=name) for name in ("head", "hidden")}
    assert optimizer._should_use_adamw(paths["head"])
    assert not optimizer._should_use_adamw(paths["hidden"])


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        (OptimConfig("adm"), "Unknown optimizer 'adm'. Perhaps you meant: "),
        (OptimConfig("Adam"), "Unknown optimizer 'Adam'. Perhaps you meant: adam."),
        (OptimConfig("optimizer"), "Unknown optimizer 'optimizer'."),
        (OptimConfig("lossscaleoptimizer"), "Unknown optimizer 'lossscaleoptimizer'."),
        (OptimConfig("zzz"), "Available: adadelta, "),
        (
            OptimConfig("schedulefreeadamw"),
            "The optimizer 'schedulefreeadamw' is not offered: Keras computes it wrongly on TensorFlow",
        ),
        (
            OptimConfig("sgd", {"momentun": 0.9}),
            "The optimizer 'sgd' takes no argument 'momentun'. Perhaps you meant: momentum.",
        ),
        (
            OptimConfig("sgd", {"momentum": "high"}),
            "'momentum' of the optimizer 'sgd' must be float. Received: 'high'.",
        ),
        (OptimConfig("sgd", {"nesterov": 1}), "'nesterov' of the optimizer 'sgd' must be bool. Received: 1."),
        (OptimConfig("sgd", {"momentum": 2.0}), "The optimizer 'sgd' cannot be built: "),
        (OptimConfig("lars", {"momentum": 2.0}), "The momentum of LARS must lie in [0, 1]. Received: 2.0."),
        (OptimConfig("adam", {"clipnorm": 1.0, "clipvalue": 1.0}), "The optimizer 'adam' cannot be built: "),
        (OptimConfig("sgd", {"learning_rate": 0.1}), "The learning rate is an option of its own: use learning_rate."),
        (
            OptimConfig("adamw", {"weight_decay": 0.1}, weight_decay=0.2),
            "--weight-decay and the argument 'weight_decay' of the optimizer 'adamw' do the same: leave out one of ",
        ),
        (
            OptimConfig("muon", {"adam_weight_decay": 0.1}, weight_decay=0.2),
            "--weight-decay and the argument 'adam_weight_decay' of the optimizer 'muon' do the same",
        ),
        (OptimConfig("adam", {"use_ema": True}, ema=0.9), "--ema and the argument 'use_ema' of the optimizer 'adam'"),
        (OptimConfig("adam", {"ema_momentum": 0.5}, ema=0.9), "--ema and the argument 'ema_momentum' of the optimizer"),
        (OptimConfig("adam", {"clipnorm": 1.0}, clip_norm=1.0), "clip_norm and the argument 'clipnorm' of the"),
        (OptimConfig("adam", {"global_clipnorm": 1.0}, clip_norm=1.0), "clip_norm and the argument 'global_clipnorm'"),
        (OptimConfig("adam", {"clipvalue": 1.0}, clip_value=1.0), "clip_value and the argument 'clipvalue' of the"),
    ],
)
def test_what_makes_no_optimizer_is_refused(config, cause):
    with pytest.raises(ConfigError, match=re.escape(cause)):
        built(config)
