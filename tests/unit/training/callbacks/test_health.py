"""Whether steps wait for their data, and what is said about it."""

import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.config.data import DataConfig
from hvdtrain.observability.events import Observer
from hvdtrain.runs.run_data import waiting_advice
from hvdtrain.training import clock
from hvdtrain.training.callbacks import health
from hvdtrain.training.clock import HAND_OVER_S, KEPT_STEPS, WARM_UP_STEPS, StepClock
from hvdtrain.training.inputs import training_data
from hvdtrain.training.plan import Plan
from tests.unit.gathering import on_ranks


@pytest.fixture
def now(monkeypatch):
    """A clock that is set by hand, in seconds."""
    seconds = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: seconds[0])
    return seconds


def run(now, steps, *, wait, work, **options):
    def batches():
        while True:
            now[0] += wait + HAND_OVER_S
            yield "batch"

    watch, stream = StepClock(8, **options), batches()
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


def test_throughput_is_that_of_steps_that_compiled_nothing(now):
    watch = StepClock(8)
    watch.resume()
    for seconds, compiled in [(9.0, True), (2.0, False), (2.0, False), (5.0, True)]:
        now[0] += seconds
        watch.tick(compiled=compiled)
    assert watch.samples_per_second() == pytest.approx(4.0)
    now[0] += 16.0
    watch.tick(compiled=True)
    assert watch.samples_per_second() == pytest.approx(0.5)  # nothing else is known
    assert watch.samples_per_second() == 0.0


def test_throughput_leaves_out_the_steps_that_an_epoch_compiles_for_its_last_batch(session):
    taken = []

    class Noted(Observer):
        def on_step(self, record):
            taken.append((record.step, record.samples_per_second))

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    trainer = hvdtrain.Trainer(model, "sgd", "mse")
    x = np.zeros((8 * 40 + 2, 2), "float32")
    data = training_data((x, x[:, :1]), trainer.backend, batch=8, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    # Few steps would all be measured; the 41st is the first with two samples, the 82nd the second.
    trainer.train(data, Plan(300, log_every=1000), observers=Noted())
    rates = dict(taken)
    assert rates[41] > rates[1] * 3, "the last batch's step has been compiled in the time of 40 others"
    assert rates[82] < rates[41] * 20


def test_steps_that_overlap_share_the_time_up_to_the_one_that_was_waited_for(now):
    watch = StepClock(8, overlapping=True)
    watch.resume()
    for seconds, waited in [(2.0, True), (0.0, False), (0.0, False), (3.0, True), (1.0, True)]:
        now[0] += seconds
        watch.tick(waited=waited)
    assert watch.steady_ms() == [2000.0, 1000.0, 1000.0, 1000.0, 1000.0]
    assert watch.samples_per_second() == pytest.approx(8 * 5 / 6.0)
    assert run(now, 20, wait=1.0, work=3.0, overlapping=True).waiting_share() == 0.0


def test_a_long_run_takes_no_more_memory(now):
    watch = StepClock(8)
    for _ in range(100):
        watch.note(5.0)
    for _ in range(KEPT_STEPS):
        watch.note(1.0, waited=0.25)
    assert watch.steady_ms() == [1000.0] * KEPT_STEPS
    assert watch.steady_steps == KEPT_STEPS + 100 - WARM_UP_STEPS
    seconds = 5.0 * (100 - WARM_UP_STEPS) + KEPT_STEPS
    assert watch.waiting_share() == pytest.approx(0.25 * KEPT_STEPS / seconds)


@pytest.mark.parametrize(
    ("options", "heavy", "named", "not_named"),
    [
        ({"data": "class_folders"}, True, ["--cache memory", "data pack"], ["--data-threads", "--augment", "--batch"]),
        ({"data": "class_folders", "cache": "file"}, True, [], ["--cache", "data pack", "What helps"]),
        ({"data": "tfrecord", "data_threads": 1}, True, ["--cache", "more --data-threads"], ["data pack"]),
        ({"data": "tfrecord", "on_bad_record": "skip:1"}, True, [], ["--cache"]),
        ({"augment": ("crop",), "data_threads": 1}, False, ["--augment", "--data-threads"], ["--cache", "--batch"]),
        ({}, False, ["a larger --batch"], ["--cache", "--data-threads", "data pack"]),
    ],
)
def test_advice_names_what_is_not_done_already(options, heavy, named, not_named):
    said = waiting_advice(DataConfig(**options), heavy=heavy)
    assert all(word in said for word in named)
    assert not [word for word in not_named if word in said]


def test_one_rank_that_waits_is_found_after_enough_steps(now):
    def body(backend):
        clock = StepClock(8)
        said, step = {}, 0
        watch = health.DataWait(backend, clock, "Do this.", lambda text: said.update({step: text}))
        for step in range(1, 201):
            clock.note(1.0, 0.5 if backend.index == 1 and step > 40 else 0.0)
            if step % 5 == 0:
                watch.after_step(None)
        return said

    first, second = on_ranks(2, body)
    assert first == second
    # Looked at after 30 and after 60 steady steps; then it was said.
    assert list(first) == [WARM_UP_STEPS + 60]
    assert "on rank 1. Do this." in first[WARM_UP_STEPS + 60]


def slow_data(count):
    def slow(number):
        time.sleep(0.02)
        return np.zeros((8, 4), np.float32)

    def batch(number):
        inputs = tf.ensure_shape(tf.numpy_function(slow, [number], tf.float32), [8, 4])
        return inputs, tf.zeros([8, 1])

    return tf.data.Dataset.range(count).map(batch)


class Told(Observer):
    """Notes the steps after which something was said."""

    def __init__(self):
        self.step, self.said = 0, {}

    def on_progress(self, step):
        self.step = step

    def on_message(self, text):
        self.said[self.step] = text


def said_of_slow_data(steps):
    """What a run of so many steps says of waiting, by step."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    trainer, told = hvdtrain.Trainer(model, "sgd", "mse"), Told()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = training_data(slow_data(steps), trainer.backend, batch=None, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    trainer.train(data, Plan(steps), observers=told)
    return {step: text for step, text in told.said.items() if "steps wait for data" in text}


def test_a_run_with_slow_data_says_so_once_and_not_only_when_all_is_over(session, monkeypatch):
    assert said_of_slow_data(60) == {}, "of less than a second"
    monkeypatch.setattr(health, "WORTH_S", 0.5)
    said = said_of_slow_data(60)
    assert list(said) == [40]
    assert "num_parallel_calls" in said[40]
    assert "--" not in said[40]
