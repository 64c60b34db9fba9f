"""Iterators of a process that has one core."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.runtime.startup import end_iterators_at_once
from tests.launching import job_environment


@pytest.fixture
def one_core(monkeypatch):
    monkeypatch.setattr(tf.data.Dataset, "__iter__", tf.data.Dataset.__iter__)
    end_iterators_at_once()


def options(enabled=None, inject=None):
    made = tf.data.Options()
    if enabled is not None:
        made.autotune.enabled = enabled
    if inject is not None:
        made.experimental_optimization.inject_prefetch = inject
    return made


def iterated(dataset):
    """Return the dataset that an iterator of `dataset` reads."""
    return iter(dataset)._dataset


def kinds(dataset):
    """Return the classes of a dataset and of what it reads, outermost first."""
    return [type(dataset).__name__.strip("_"), *(kind for each in dataset._inputs() for kind in kinds(each))]


NUMBERS = tf.data.Dataset.range(6)


def test_nothing_is_tuned_and_one_element_is_read_ahead(one_core):
    made = iterated(NUMBERS.map(lambda x: x * 2))
    assert made.options().autotune.enabled is False
    assert kinds(made) == ["OptionsDataset", "PrefetchDataset", "MapDataset", "RangeDataset"]


def test_what_reads_ahead_or_must_not_stays_as_it_is(one_core):
    assert kinds(iterated(NUMBERS.prefetch(2))) == ["OptionsDataset", "PrefetchDataset", "RangeDataset"]
    ours = NUMBERS.prefetch(2).with_options(options())
    assert kinds(iterated(ours)) == ["OptionsDataset", "OptionsDataset", "PrefetchDataset", "RangeDataset"]
    kept = NUMBERS.repeat().with_options(options(inject=False))
    assert "PrefetchDataset" not in kinds(iterated(kept))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_users_own_choice_holds(one_core, enabled):
    chosen = NUMBERS.with_options(options(enabled=enabled))
    assert iterated(chosen) is chosen


def test_a_limit_of_memory_keeps_its_tuning(one_core):
    limited = tf.data.Options()
    limited.autotune.ram_budget = 2**20
    assert iterated(given := NUMBERS.with_options(limited)) is given


def test_a_second_session_changes_nothing(one_core):
    once = tf.data.Dataset.__iter__
    end_iterators_at_once()
    assert tf.data.Dataset.__iter__ is once


@pytest.mark.filterwarnings("error::UserWarning")
def test_the_elements_are_those_of_the_dataset(one_core):
    shuffled = NUMBERS.shuffle(6, seed=3).batch(2, drop_remainder=True)

    @tf.function
    def total(dataset):
        found = tf.constant(0, tf.int64)
        for each in dataset:
            found += tf.reduce_sum(each)
        iterator = iter(dataset)
        return found + tf.reduce_sum(next(iterator)) * 0

    epochs = [np.concatenate(list(shuffled.as_numpy_iterator())) for _ in range(2)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert not np.array_equal(*epochs)
    assert total(shuffled) == 15


def test_keras_trains_as_before(monkeypatch):
    def weights():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        x, y = np.random.rand(24, 4), np.random.rand(24, 3)
        model.fit(x, y, batch_size=4, epochs=2, validation_data=(x, y), verbose=0)
        return model.get_weights()

    before = weights()
    monkeypatch.setattr(tf.data.Dataset, "__iter__", tf.data.Dataset.__iter__)
    end_iterators_at_once()
    for mine, theirs in zip(weights(), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("cores", "enabled"), [(1, False), pytest.param(2, None, marks=pytest.mark.extended)])
def test_a_session_looks_at_its_cores(cores, enabled):
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < cores:
        pytest.skip("this machine has one core")
    code = f"""if True:
        import os
        os.sched_setaffinity(0, {usable[:cores]})
        import hvdtrain
        hvdtrain.init()
        import tensorflow as tf
        print("TUNED", iter(tf.data.Dataset.range(2))._dataset.options().autotune.enabled)
    """
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=job_environment())
    assert f"TUNED {enabled}\n" in done.stdout, done.stderr[-2000:]
