import math
import re

import keras
import numpy as np
import pytest

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.optim import OptimConfig
from hvdtrain.optim.optimizers import build_optimizer, known_optimizers
from hvdtrain.optim.schedules import WarmupSchedule, learning_rate

PEAK = 0.5


def rates(total, steps, **options):
    schedule = learning_rate(OptimConfig("sgd", learning_rate=PEAK, **options), total)
    return [float(schedule(step)) for step in steps]


def test_a_rate_that_does_not_move_is_a_number():
    assert learning_rate(OptimConfig(learning_rate=PEAK), 100) == PEAK


def test_the_warm_up_rises_from_the_first_step_to_the_peak():
    assert rates(100, range(6), warmup_steps=4) == pytest.approx([PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK, PEAK, PEAK])


def test_after_the_warm_up_a_constant_rate_stays():
    assert rates(10, [4, 9, 10, 10**6], warmup_steps=4) == pytest.approx([PEAK] * 4)


def test_the_cosine_falls_from_the_peak_to_zero():
    steps = [0, 25, 50, 75, 99, 100]
    expected = [PEAK * (1 + math.cos(math.pi * step / 100)) / 2 for step in steps]
    assert rates(100, steps, schedule="cosine") == pytest.approx(expected, abs=1e-7)
    assert expected[2] == PEAK / 2


def test_the_cosine_spans_what_the_warm_up_leaves():
    got = rates(110, [0, 9, 10, 60, 110], schedule="cosine", warmup_steps=10)
    assert got == pytest.approx([PEAK / 10, PEAK, PEAK, PEAK / 2, 0.0], abs=1e-7)


def test_past_its_end_the_cosine_stays_at_zero():
    assert rates(100, [101, 150, 10**6], schedule="cosine") == pytest.approx([0.0] * 3, abs=1e-7)


@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (2, 1), (5, 4)])
def test_short_runs_have_finite_rates(total, warmup):
    got = rates(total, range(total), schedule="cosine", warmup_steps=warmup)
    assert all(0 < rate <= PEAK * (1 + 1e-6) for rate in got)


@pytest.mark.parametrize(("total", "warmup"), [(1, 1), (5, 5), (5, 50)])
def test_a_warm_up_as_long_as_the_run_is_refused(total, warmup):
    with pytest.raises(ConfigError, match=f"--warmup-steps {warmup} leaves nothing of the run's {total} steps"):
        rates(total, range(total), warmup_steps=warmup)


def test_a_schedule_survives_saving():
    schedule = WarmupSchedule(PEAK, 3, 20, "cosine")
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert [float(again(step)) for step in range(20)] == [float(schedule(step)) for step in range(20)]


def test_the_optimizer_follows_the_schedule():
    optimizer = build_optimizer(OptimConfig("sgd", learning_rate=PEAK, warmup_steps=2), 10)
    variable = keras.Variable(np.zeros(1, "float32"))
    optimizer.build([variable])
    moves = []
    for _ in range(3):
        before = float(variable[0])
        optimizer.apply([np.ones(1, "float32")], [variable])
        moves.append(before - float(variable[0]))
    assert moves == pytest.approx([PEAK / 2, PEAK, PEAK])


@pytest.mark.parametrize("name", known_optimizers())
def test_every_optimizer_that_is_offered_builds_and_moves_a_weight(name):
    optimizer = build_optimizer(OptimConfig(name, learning_rate=0.1, schedule="cosine"), 10)
    variable = keras.Variable(np.ones((3, 3), "float32"))
    optimizer.build([variable])
    optimizer.apply([np.arange(9, dtype="float32").reshape(3, 3)], [variable])
    assert float(np.abs(variable.numpy() - 1).max()) > 1e-7


def test_kerass_well_known_optimizers_are_offered():
    assert {"sgd", "adam", "adamw", "rmsprop", "adagrad", "lion", "lamb", "adafactor"} <= set(known_optimizers())


def test_arguments_reach_the_optimizer():
    config = OptimConfig("sgd", {"momentum": 0.9, "nesterov": True, "clipnorm": 1.0}, learning_rate=0.1)
    optimizer = build_optimizer(config, 10)
    assert type(optimizer) is keras.optimizers.SGD
    assert (optimizer.momentum, optimizer.nesterov, optimizer.clipnorm) == (0.9, True, 1.0)
    assert float(optimizer.learning_rate) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        (OptimConfig("adm"), "Unknown optimizer 'adm'. Perhaps you meant: "),
        (OptimConfig("Adam"), "Unknown optimizer 'Adam'. Perhaps you meant: adam."),
        (OptimConfig("optimizer"), "Unknown optimizer 'optimizer'."),
        (OptimConfig("lossscaleoptimizer"), "Unknown optimizer 'lossscaleoptimizer'."),
        (OptimConfig("zzz"), "Available: adadelta, "),
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
        (OptimConfig("adam", {"clipnorm": 1.0, "clipvalue": 1.0}), "The optimizer 'adam' cannot be built: "),
        (OptimConfig("sgd", {"learning_rate": 0.1}), "The learning rate is an option of its own: use --learning-rate."),
    ],
)
def test_what_makes_no_optimizer_is_refused(config, cause):
    with pytest.raises(ConfigError, match=re.escape(cause)):
        build_optimizer(config, 10)
