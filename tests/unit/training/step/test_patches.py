"""Methods that are replaced while a step is traced, beside threads that have nothing to do with it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.training.step.patches import offset_seeds, replaced, traced_anew
from hvdtrain.training.trainer import Trainer

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
        with replaced(Thing, "name", lambda thing: f"of thread {number}"):
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
        with replaced(thing, "get", lambda value=value: value), traced_anew(), traced_anew():
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
