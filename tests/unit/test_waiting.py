"""Whether steps wait for their data, and what is said about it."""

import itertools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.training import clock
from hvdtrain.training.advice import waiting_warning
from hvdtrain.training.clock import HAND_OVER_S, WARM_UP_STEPS, StepClock


@pytest.fixture
def now(monkeypatch):
    """A clock that is set by hand, in seconds."""
    seconds = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: seconds[0])
    return seconds


def run(now, steps, *, wait, work):
    def batches():
        while True:
            now[0] += wait + HAND_OVER_S
            yield "batch"

    watch, stream = StepClock(8), batches()
    watch.resume()
    for _ in range(steps):
        assert watch.next_of(stream) == "batch"
        now[0] += work - HAND_OVER_S
        watch.tick()
    return watch


def test_the_share_of_the_steady_steps(now):
    assert run(now, 20, wait=1.0, work=3.0).waiting_share() == pytest.approx(0.25)
    assert run(now, 20, wait=0.0, work=3.0).waiting_share() == pytest.approx(0.0, abs=1e-9)
    assert run(now, WARM_UP_STEPS, wait=1.0, work=1.0).waiting_share() == 0.0


def test_the_first_steps_do_not_count(now):
    watch = StepClock(8)
    watch.resume()
    for step, _ in enumerate(itertools.repeat(None, 10)):

        def late(step=step):
            now[0] += HAND_OVER_S + (100.0 if step < WARM_UP_STEPS else 1.0)
            yield step

        watch.next_of(late())
        now[0] += 1.0 - HAND_OVER_S
        watch.tick()
    assert watch.waiting_share() == pytest.approx(0.5)


def test_taking_a_batch_that_is_ready_is_no_waiting(now):
    assert run(now, 20, wait=-HAND_OVER_S / 2, work=0.002).waiting_share() == 0.0


def test_it_is_said_where_it_is_worth_a_word():
    assert waiting_warning(0.05) is None
    said = waiting_warning(0.31)
    assert said.startswith("warning: steps wait for data 31% of the time")
    for cure in ("--cache", "data pack", "--data-threads", "data bench"):
        assert cure in said


def test_a_run_with_slow_data_says_so_once(session, capsys):
    def slow(number):
        time.sleep(0.02)
        return np.full((8, 4), number, np.float32)

    def batch(number):
        inputs = tf.ensure_shape(tf.numpy_function(slow, [number], tf.float32), [8, 4])
        return inputs, tf.zeros([8, 1])

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    trainer = hvdtrain.Trainer(model, "sgd", "mse")
    trainer.fit(tf.data.Dataset.range(15).map(batch), epochs=2)
    said = capsys.readouterr()
    assert (said.out + said.err).count("warning: steps wait for data") == 1
