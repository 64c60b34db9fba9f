"""How TensorFlow starts in a process of hvdtrain, and its iterators, which end at once."""

import inspect
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.runtime.startup import _without_noise, end_iterators_at_once

CHATTER = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795362227.735116    6630 port.cc:153] oneDNN custom operations are on. You may see slightly different
I0000 00:00:1795362227.735479    6630 cudart_stub.cc:31] Could not find cuda drivers on your machine
To enable the following instructions: AVX2 AVX512F FMA, in other operations, rebuild TensorFlow
2026-11-22 10:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary is optimized
"""
NO_DRIVER = "E0000 00:00:1795362314.804999    7452 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error\n"
SERIOUS = """\
W0000 00:00:1795362227.735479    6630 cpu_allocator_impl.cc:84] Allocation of 4000000000 exceeds 10% of memory.
E0000 00:00:1795362227.735479    6630 gpu_device.cc:2342] Cannot dlopen some GPU libraries.
Intel MKL ERROR: no such instruction
UserWarning: a package is old
"""


def speak(capfd, level, monkeypatch, error=None, text=CHATTER + SERIOUS):
    """Write to descriptor 2 within the body, and return what reached it."""
    if level is None:
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    with _without_noise():
        os.write(2, text.encode())
        if error:
            raise error
    return capfd.readouterr().err


@pytest.mark.parametrize("level", [None, "1", "2", "3"])
def test_chatter_is_hidden_and_nothing_else_is(capfd, monkeypatch, level):
    assert speak(capfd, level, monkeypatch) == SERIOUS
    os.write(2, CHATTER.encode())
    assert capfd.readouterr().err == CHATTER, "later lines are not"


@pytest.mark.parametrize(("gpu", "shown"), [(False, ""), (True, NO_DRIVER)])
def test_a_driver_that_does_not_start_is_told_where_there_is_a_gpu(capfd, monkeypatch, gpu, shown):
    monkeypatch.setattr("hvdtrain.runtime.startup.Path.exists", lambda path: gpu)
    assert speak(capfd, None, monkeypatch, text=NO_DRIVER) == shown


def test_who_asks_for_it_gets_it(capfd, monkeypatch):
    assert speak(capfd, "0", monkeypatch) == CHATTER + SERIOUS


def test_an_error_brings_out_what_was_said_before_it(capfd, monkeypatch):
    with pytest.raises(ImportError):
        speak(capfd, None, monkeypatch, ImportError("no such symbol"))
    assert capfd.readouterr().err == CHATTER + SERIOUS


def script(code, **environ):
    """What a script writes to standard error, and what it prints."""
    environ = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"} | environ
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environ, check=True)
    return done.stderr, done.stdout


def test_a_script_starts_in_silence_with_its_threads_and_iterators_that_end_at_once():
    code = "import hvdtrain; hvdtrain.init(threads=2); import gc, keras, tensorflow as tf; "
    code += (
        "print(tf.config.threading.get_intra_op_parallelism_threads(), gc.isenabled(), gc.get_freeze_count() > 1e5, "
    )
    code += "iter(tf.data.Dataset.range(2))._dataset.options().autotune.enabled)"  # a rank may share its cores
    assert script(code) == ("", "2 True True False\n")


@pytest.mark.extended  # it starts TensorFlow
def test_a_run_without_standard_error_starts_too():
    code = "import os, sys; os.close(2); sys.stderr = None; import hvdtrain; import tensorflow as tf; "
    assert script(code + "print(tf.ones(1).numpy())")[1] == "[1.]\n"


@pytest.fixture
def untuned(monkeypatch):
    monkeypatch.setattr(tf.data.Dataset, "__iter__", tf.data.Dataset.__iter__)
    end_iterators_at_once(threads=2)


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


def test_nothing_is_tuned_and_one_element_is_read_ahead(untuned):
    made = iterated(NUMBERS.map(lambda x: x * 2))
    assert made.options().autotune.enabled is False
    assert kinds(made) == ["OptionsDataset", "PrefetchDataset", "MapDataset", "RangeDataset"]


def test_what_reads_ahead_or_must_not_stays_as_it_is(untuned):
    assert kinds(iterated(NUMBERS.prefetch(2))) == ["OptionsDataset", "PrefetchDataset", "RangeDataset"]
    ours = NUMBERS.prefetch(2).with_options(options())
    assert kinds(iterated(ours)) == ["OptionsDataset", "OptionsDataset", "PrefetchDataset", "RangeDataset"]
    kept = NUMBERS.repeat().with_options(options(inject=False))
    assert "PrefetchDataset" not in kinds(iterated(kept))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_users_own_choice_holds(untuned, enabled):
    chosen = NUMBERS.with_options(options(enabled=enabled))
    assert iterated(chosen) is chosen


def test_a_limit_of_memory_keeps_its_tuning(untuned):
    limited = tf.data.Options()
    limited.autotune.ram_budget = 2**20
    assert iterated(given := NUMBERS.with_options(limited)) is given


def test_a_second_session_changes_nothing(untuned):
    once = tf.data.Dataset.__iter__
    end_iterators_at_once(threads=2)
    assert tf.data.Dataset.__iter__ is once


@pytest.mark.filterwarnings("error::UserWarning")
def test_the_elements_are_those_of_the_dataset(untuned):
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
    end_iterators_at_once(threads=2)
    for mine, theirs in zip(weights(), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("threads", "own", "tuned"), [(16, None, False), (17, None, True), (2, 24, True), (24, 8, False)]
)
def test_tuning_stays_where_it_can_add_parallel_calls(monkeypatch, threads, own, tuned):
    monkeypatch.setattr(tf.data.Dataset, "__iter__", inspect.unwrap(tf.data.Dataset.__iter__))  # a session's, if any
    end_iterators_at_once(threads)
    chosen = tf.data.Options()
    if own is not None:
        chosen.threading.private_threadpool_size = own
    assert (iterated(NUMBERS.with_options(chosen)).options().autotune.enabled is None) == tuned


@pytest.mark.extended  # it starts TensorFlow
def test_a_session_of_many_threads_leaves_them_to_tuning():
    code = "import hvdtrain; hvdtrain.init(threads=17); import tensorflow as tf; "
    code += "print(iter(tf.data.Dataset.range(2))._dataset.options().autotune.enabled)"
    assert script(code)[1] == "None\n"
