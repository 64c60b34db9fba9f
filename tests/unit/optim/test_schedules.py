import math
import re

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.optim import OptimConfig
from hvdtrain.optim.schedules import WarmupSchedule, describe_rate, scaled_learning_rate, scheduled_rate

PEAK = 0.5


def rates(total, steps, **options):
    schedule = scheduled_rate(OptimConfig("sgd", learning_rate=PEAK, **options), total, PEAK)
    return [float(schedule(step)) for step in steps]


def test_a_rate_that_does_not_move_is_a_number():
    assert scheduled_rate(OptimConfig(learning_rate=0.1), 100, PEAK) == PEAK


# -- the warm-up --


def test_the_warm_up_rises_from_the_first_step_to_the_peak():
    assert rates(100, range(6), warmup_steps=4) == pytest.approx([PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK, PEAK, PEAK])


def test_after_the_warm_up_a_constant_rate_stays():
    assert rates(10, [4, 9, 10, 10**6], warmup_steps=4) == pytest.approx([PEAK] * 4)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "cosine"},
        {"schedule": "polynomial", "decay_power": 2.0},
        {"schedule": "step", "decay_at": (0.5,)},
    ],
)
def test_every_schedule_warms_up_alike_and_goes_on_from_the_peak(options):
    assert rates(100, [0, 9, 10], warmup_steps=10, **options) == pytest.approx([PEAK / 10, PEAK, PEAK])


@pytest.mark.parametrize(("total", "warmup"), [(1, 1), (5, 5), (5, 50)])
def test_a_warm_up_as_long_as_the_run_is_refused(total, warmup):
    with pytest.raises(ConfigError, match=f"warmup_steps={warmup} leaves nothing of the run's {total} steps"):
        rates(total, range(total), warmup_steps=warmup)


# -- cosine --


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


# -- polynomial, and where it and the cosine end --


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_the_polynomial_falls_by_its_power(power, final):
    steps = np.array([20, 21, 60, 99, 119, 120, 500])
    left = np.maximum(0.0, 1 - (steps - 20) / 100)
    expected = PEAK * (final + (1 - final) * left**power)
    options = {"schedule": "polynomial", "decay_power": power, "final_rate": final, "warmup_steps": 20}
    assert rates(120, steps, **options) == pytest.approx(list(expected), rel=1e-5, abs=1e-7)


def test_a_cosine_ends_at_its_final_rate():
    steps = np.array([0, 30, 50, 99, 100, 500])
    expected = PEAK * (0.2 + 0.8 * (1 + np.cos(np.pi * np.minimum(1, steps / 100))) / 2)
    assert rates(100, steps, schedule="cosine", final_rate=0.2) == pytest.approx(list(expected), rel=1e-6)


# -- steps --


def test_the_step_schedule_falls_at_its_shares_of_the_run():
    steps = [0, 49, 50, 74, 75, 99, 10**6]
    got = rates(100, steps, schedule="step", decay_at=(0.5, 0.75))
    assert got == pytest.approx([PEAK, PEAK, PEAK / 10, PEAK / 10, PEAK / 100, PEAK / 100, PEAK / 100])


def test_the_step_schedule_falls_by_its_factor():
    got = rates(30, [8, 9, 20, 21], schedule="step", decay_at=(0.3, 0.7), decay_factor=0.5)
    assert got == pytest.approx([PEAK, PEAK / 2, PEAK / 2, PEAK / 4])


def test_shares_are_of_the_run_with_its_warm_up():
    got = rates(100, [9, 10, 49, 50], schedule="step", decay_at=(0.5,), warmup_steps=10)
    assert got == pytest.approx([PEAK, PEAK, PEAK, PEAK / 10])
    assert rates(100, [49, 50], schedule="step", decay_at=(0.5,), warmup_steps=50) == pytest.approx([PEAK, PEAK / 10])


def test_a_fall_within_the_warm_up_is_refused():
    cause = "decay_at=0.1 is step 10 of 100, before the warm-up of warmup_steps=20 ends."
    with pytest.raises(ConfigError, match=re.escape(cause)):
        rates(100, [0], schedule="step", decay_at=(0.1, 0.5), warmup_steps=20)


# -- saving --


@pytest.mark.parametrize(
    "arguments",
    [
        ("constant",),
        ("cosine", 0.1),
        ("polynomial", 0.1, 2.0),
        ("step", 0.0, 1.0, (0.25, 0.5), 0.3),
    ],
)
def test_a_schedule_survives_saving(arguments):
    schedule = WarmupSchedule(PEAK, 3, 20, *arguments)
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert again.get_config() == schedule.get_config()
    assert [float(again(step)) for step in range(20)] == [float(schedule(step)) for step in range(20)]


def test_a_schedule_without_the_newer_arguments_is_read():
    config = {"peak": PEAK, "warmup_steps": 3, "total_steps": 20, "shape": "cosine"}
    again, schedule = WarmupSchedule.from_config(config), WarmupSchedule(PEAK, 3, 20, "cosine", 0.0)
    assert [float(again(step)) for step in range(21)] == [float(schedule(step)) for step in range(21)]


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


def test_a_whole_number_as_rate_is_a_float():
    assert isinstance(scaled_learning_rate(OptimConfig(learning_rate=1), 64), float)


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


def test_a_public_rate_follows_the_batch():
    rate = hvdtrain.learning_rate_schedule(0.1, 9, lr_scaling="linear", batch=256, base_batch=64)
    assert rate == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"schedule": "cosin"}, "Unknown schedule 'cosin'. Perhaps you meant: cosine."),
        ({"lr_scaling": "lineer"}, "Unknown lr_scaling 'lineer'. Perhaps you meant: linear."),
        ({"lr_scaling": "linear", "base_batch": 8}, "lr_scaling and batch go together. Received: lr_scaling='linear'"),
        ({"batch": 8}, "lr_scaling and batch go together. Received: lr_scaling='none', batch=8."),
        ({"lr_scaling": "linear", "batch": 8}, "add base_batch"),
        ({"warmup_steps": 40}, "warmup_steps=40 leaves nothing of the run's 40 steps at the full rate."),
        ({"decay_power": 2.0}, "decay_power has no effect with schedule='constant'"),
    ],
)
def test_a_public_schedule_that_cannot_be_is_refused(options, cause):
    with pytest.raises(ConfigError, match=re.escape(cause)):
        hvdtrain.learning_rate_schedule(PEAK, 40, **options)
