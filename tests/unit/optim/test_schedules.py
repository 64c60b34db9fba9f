import math
import re

import keras
import pytest

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.optim import OptimConfig
from hvdtrain.optim.schedules import WarmupSchedule, describe_rate, scaled_learning_rate, scheduled_rate

PEAK = 0.5


def rates(total, steps, **options):
    schedule = scheduled_rate(OptimConfig("sgd", learning_rate=PEAK, **options), total, PEAK)
    return [float(schedule(step)) for step in steps]


# By name: steps of the run, options, and the rate as a share of the peak by step.
SHARES = {
    "constant": (10, {"warmup_steps": 4}, {0: 1 / 4, 1: 1 / 2, 3: 1, 4: 1, 9: 1, 10**6: 1}),
    "cosine": (100, {"schedule": "cosine"}, {0: 1, 25: (1 + math.sqrt(0.5)) / 2, 50: 1 / 2, 100: 0, 500: 0}),
    "cosine to a rate": (
        110,
        {"schedule": "cosine", "final_rate": 0.2, "warmup_steps": 10},
        {0: 1 / 10, 9: 1, 10: 1, 60: 0.6, 110: 0.2, 500: 0.2},
    ),
    "polynomial": (120, {"schedule": "polynomial", "warmup_steps": 20}, {0: 1 / 20, 20: 1, 60: 0.6, 119: 0.01, 500: 0}),
    "polynomial to a rate": (
        100,
        {"schedule": "polynomial", "decay_power": 2.0, "final_rate": 0.1},
        {0: 1, 50: 0.1 + 0.9 / 4, 100: 0.1, 500: 0.1},
    ),
    "steps": (
        100,
        {"schedule": "step", "decay_at": (0.5, 0.75)},
        {0: 1, 49: 1, 50: 0.1, 74: 0.1, 75: 0.01, 10**6: 0.01},
    ),
    "steps by a factor": (
        30,
        {"schedule": "step", "decay_at": (0.3, 0.7), "decay_factor": 0.5, "warmup_steps": 5},
        {0: 1 / 5, 4: 1, 8: 1, 9: 1 / 2, 20: 1 / 2, 21: 1 / 4},
    ),
}


@pytest.mark.parametrize("name", SHARES)
def test_rates_rise_to_the_peak_and_fall_as_their_schedule_says(name):
    total, options, shares = SHARES[name]
    expected = [PEAK * share for share in shares.values()]
    assert rates(total, shares, **options) == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("total", "options", "cause"),
    [
        (5, {"warmup_steps": 5}, "warmup_steps=5 leaves nothing of the run's 5 steps"),
        (
            100,
            {"schedule": "step", "decay_at": (0.1, 0.5), "warmup_steps": 20},
            "decay_at=0.1 is step 10 of 100, before the warm-up of warmup_steps=20 ends.",
        ),
    ],
)
def test_a_warm_up_that_is_too_long_is_refused(total, options, cause):
    with pytest.raises(ConfigError, match=re.escape(cause)):
        rates(total, [0], **options)


@pytest.mark.parametrize(
    "arguments", [("constant",), ("cosine", 0.1), ("polynomial", 0.1, 2.0), ("step", 0.0, 1.0, (0.25, 0.5), 0.3)]
)
def test_a_schedule_survives_saving(arguments):
    schedule = WarmupSchedule(PEAK, 3, 20, *arguments)
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert again.get_config() == schedule.get_config()
    assert [float(again(step)) for step in range(20)] == [float(schedule(step)) for step in range(20)]


# -- scaling by the batch --


@pytest.mark.parametrize(
    ("scaling", "base", "batch", "expected"),
    [
        ("none", None, 4096, 0.001),
        ("linear", 256, 1024, 0.004),
        ("linear", 256, 64, 0.00025),
        ("linear", 256, 256, 0.001),
        ("sqrt", 256, 1024, 0.002),
        ("sqrt", 100, 50, 0.001 * math.sqrt(0.5)),
    ],
)
def test_the_rate_follows_the_batch(scaling, base, batch, expected):
    config = OptimConfig(learning_rate=0.001, lr_scaling=scaling, base_batch=base)
    assert scaled_learning_rate(config, batch) == pytest.approx(expected, rel=1e-12)
    assert config.learning_rate == 0.001


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        ({}, "peak 0.001, constant"),
        (
            {"lr_scaling": "linear", "base_batch": 256, "warmup_steps": 100, "schedule": "cosine"},
            "peak 0.004 (0.001 x 1024/256, linear), warm-up 100 steps, cosine",
        ),
        (
            {"lr_scaling": "sqrt", "base_batch": 256, "schedule": "cosine", "final_rate": 0.1},
            "peak 0.002 (0.001 x sqrt(1024/256), sqrt), cosine to 0.0002",
        ),
        ({"schedule": "polynomial", "decay_power": 2.0}, "peak 0.001, polynomial of power 2"),
        ({"schedule": "polynomial", "final_rate": 0.5}, "peak 0.001, polynomial of power 1 to 0.0005"),
        ({"schedule": "step", "decay_at": (0.5, 0.75)}, "peak 0.001, x 0.1 at step 200, 300 of 400"),
    ],
)
def test_the_rate_is_told_in_one_phrase(options, phrase):
    assert describe_rate(OptimConfig(**options), batch=1024, total_steps=400) == phrase


# -- in a user's own loop --


@pytest.mark.parametrize(
    ("ours", "options"),
    [
        ({}, {}),
        ({"schedule": "cosine", "warmup_steps": 5, "final_rate": 0.1}, {}),
        ({"schedule": "step", "decay_at": [0.5, 0.75], "decay_factor": 0.5}, {"decay_at": (0.5, 0.75)}),
        ({"schedule": "polynomial", "decay_power": 2.0, "lr_scaling": "linear", "base_batch": 8}, {}),
        ({"warmup_steps": 3, "lr_scaling": "sqrt", "base_batch": 8}, {}),
    ],
)
def test_a_public_schedule_is_that_of_the_command_line(ours, options):
    config = OptimConfig("sgd", learning_rate=PEAK, **{**ours, **options})
    expected = scheduled_rate(config, 40, scaled_learning_rate(config, 32))
    batch = {"batch": 32} if "base_batch" in ours else {}
    got = hvdtrain.learning_rate_schedule(PEAK, 40, **ours, **batch)
    if not ours:
        assert got == PEAK
        return
    assert [float(got(step)) for step in range(42)] == [float(expected(step)) for step in range(42)]
    assert isinstance(keras.optimizers.SGD(got)._learning_rate, WarmupSchedule)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"schedule": "cosin"}, "schedule must be one of constant, cosine, step, polynomial. Received: 'cosin'."),
        ({"lr_scaling": "lineer", "batch": 8}, "lr_scaling must be one of none, linear, sqrt. Received: 'lineer'."),
        ({"lr_scaling": "linear", "base_batch": 8}, "lr_scaling and batch go together. Received: lr_scaling='linear'"),
        ({"batch": 8}, "lr_scaling and batch go together. Received: lr_scaling='none', batch=8."),
        ({"lr_scaling": "linear", "batch": 8}, "needs base_batch"),
        ({"warmup_steps": 40}, "warmup_steps=40 leaves nothing of the run's 40 steps at the full rate."),
        ({"decay_power": 2.0}, "decay_power=2.0 has no effect without schedule='polynomial'"),
    ],
)
def test_a_public_schedule_that_cannot_be_is_refused(options, cause):
    with pytest.raises(ConfigError, match=re.escape(cause)):
        hvdtrain.learning_rate_schedule(PEAK, 40, **options)
