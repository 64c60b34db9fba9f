"""What is replaced while a step is traced, beside threads that have nothing to do with it."""

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import cond

from hvdtrain.compat import seams
from hvdtrain.training.step.traced import offset_seeds, traced_anew
from hvdtrain.training.trainer import Trainer

ROOT = Path(__file__).parents[3]
NAME, GET = (seams.Seam("a test", name, "it is tried") for name in ("name", "get"))
TABLE = [each for each in vars(seams).values() if isinstance(each, seams.Seam)]
ORIGINALS = (keras.random.SeedGenerator.next, keras.optimizers.Optimizer.apply)


def in_another_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(20)


def drawn():
    return keras.random.SeedGenerator(5).next(ordered=False).numpy().tolist()


def test_a_thread_that_draws_meanwhile_draws_as_ever():
    expected = drawn()
    with offset_seeds(1):
        assert in_another_thread(drawn) == expected
        assert drawn() == [seed + 7919 for seed in expected]
    assert drawn() == expected


def test_threads_that_replace_a_method_at_once_see_their_own_each():
    """Whatever the order in which they leave, the original is back when all have."""

    class Thing:
        def name(self):
            return "original"

    original, seen = Thing.name, {}
    inside, leave = [[threading.Event() for _ in range(2)] for _ in range(2)]

    def replace(number):
        with NAME.replaced(Thing, lambda thing: f"of thread {number}"):
            inside[number].set()
            assert inside[1 - number].wait(20)
            assert leave[number].wait(20)
            seen[number] = Thing().name()

    threads = [threading.Thread(target=replace, args=(number,)) for number in range(2)]
    for number, thread in enumerate(threads):
        thread.start()
        assert inside[number].wait(20)
    for number, thread in enumerate(threads):
        assert Thing().name() == "original"
        leave[number].set()
        thread.join(20)
    assert seen == {0: "of thread 0", 1: "of thread 1"}
    assert vars(Thing)["name"] is original


def test_a_function_that_was_traced_before_is_traced_with_the_replacements():
    class Thing:
        @tf.function
        def name(self):
            return tf.constant(self.get())

        def get(self):
            return 1.0

    thing, found = Thing(), []
    thing.name()
    for value in (2.0, 3.0):
        with GET.replaced(thing, lambda value=value: value), traced_anew(), traced_anew():
            found += [float(thing.name()), float(thing.name())]
    assert found == [2.0, 2.0, 3.0, 3.0]
    assert float(thing.name()) == 1.0


class Busy(keras.Model):
    """While its step is traced, another thread trains another model and draws."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = []

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        self.seen.append(in_another_thread(lambda: (drawn(), applied())))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def applied():
    """Apply a gradient of 1 by an optimizer that no model has, and return the variable's new value."""
    variable = keras.Variable(1.0)
    keras.optimizers.SGD(0.25).apply([tf.ones([])], [variable])
    return float(variable)


@pytest.mark.usefixtures("session")
def test_a_thread_that_trains_while_a_step_is_traced_is_left_alone():
    model, expected = Busy(), drawn()
    model.compile("sgd")
    Trainer(model).fit(np.ones((8, 3), "float32"), batch=4, verbose=0)
    assert model.seen
    assert all(seen == (expected, 0.75) for seen in model.seen)
    assert (keras.random.SeedGenerator.next, keras.optimizers.Optimizer.apply) == ORIGINALS
    assert "apply" not in vars(keras.optimizers.Optimizer), "inherited, as before"


PLACES = [
    *(tf.GradientTape, tf.Tensor, tf.__internal__.FuncGraph, type(tf.function(lambda: None))),
    *(keras.layers.Layer, keras.losses.Loss, keras.optimizers.Optimizer, keras.random.SeedGenerator, keras.Variable),
    *(sys.modules[keras.losses.Loss.__module__], cond),
]
"""Classes and modules that others use, too."""


def things_of(model):
    """Return what a compiled model has that a seam may be in."""
    optimizer = model.optimizer
    return [model, optimizer, *model.layers, *model.metrics, *model._compile_loss.metrics, *model.variables, *PLACES]


@pytest.mark.usefixtures("session")
def test_every_thing_is_as_it_was_after_a_training():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    model.compile("adam", ["mse"], metrics=["mae"], jit_compile=False)
    x, entered, replaced = np.ones((8, 3), "float32"), set(), seams.Seam.replaced

    def noting(seam, owner, by):
        entered.add(seam)
        return replaced(seam, owner, by)

    model.train_on_batch(x, np.ones((8, 4), "float32"))  # the metrics are made
    before = [dict(vars(thing)) for thing in things_of(model)]
    with mock.patch.object(seams.Seam, "replaced", noting):
        Trainer(model).fit(x, np.ones((8, 4), "float32"), batch=4, verbose=0)
    assert {
        seams.APPLY,
        seams.RATE,
        seams.GRADIENT,
        seams.LOSS,
        seams.METRIC,
        seams.UPDATE,
        seams.LAYER_CALL,
    } <= entered
    after = [vars(thing) for thing in things_of(model)]
    names = {seam.name for seam in TABLE}
    for then, now, thing in zip(before, after, things_of(model), strict=True):
        assert {n: then.get(n) for n in names} == {n: now.get(n) for n in names}, thing


def test_an_error_leaves_every_thing_as_it_was():
    optimizer = keras.optimizers.SGD()

    def fail():
        with seams.APPLY.replaced(optimizer, lambda _: 1 / 0):
            assert seams.APPLY.is_taken(optimizer)
            optimizer.apply([])

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "apply" not in vars(optimizer)
    assert not seams.APPLY.is_taken(optimizer)


def test_the_table_names_each_place_once():
    """And each reason tells what a reader cannot see."""
    assert len({(seam.owner, seam.name) for seam in TABLE}) == len(TABLE)
    assert all(seam.why and seam.why[0].islower() for seam in TABLE)


def test_each_seam_is_used():
    imported = set()
    for file in (ROOT / "hvdtrain").rglob("*.py"):
        for names in re.findall(
            r"^from hvdtrain\.compat\.seams import (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE
        ):
            imported |= set(names.split(", "))
    assert {name for name, each in vars(seams).items() if isinstance(each, seams.Seam)} == imported
