"""Which compiled steps are kept, and what goes with those that are not."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.training.step import graph_cache
from hvdtrain.training.step.graph_cache import GraphCache, kind_of
from hvdtrain.training.trainer import Trainer


def found(cache, kinds):
    """Return, for each of `kinds` in turn, whether it has a graph, and how many were compiled."""
    compiled = []

    def compile_(kind):
        compiled.append(kind)
        return tf.function(lambda: tf.constant(kind)).get_concrete_function()

    graphs = [cache.find(kind, lambda kind=kind: compile_(kind)) for kind in kinds]
    assert all(
        graph is None or graph().numpy() in (kind, str(kind).encode())
        for graph, kind in zip(graphs, kinds, strict=True)
    )
    return [graph is not None for graph in graphs], compiled


@pytest.fixture
def small(monkeypatch):
    """A cache of 2 graphs, which are given up after 10 steps for a kind that comes 3 times."""
    for name, value in (("MOST_GRAPHS", 2), ("PATIENCE", 10), ("OFTEN", 3)):
        monkeypatch.setattr(graph_cache, name, value)
    return GraphCache()


def test_kinds_that_keep_changing_compile_the_first_ones_alone(small):
    has_graph, compiled = found(small, list(range(50)) * 4)
    assert compiled == [0, 1]
    assert sum(has_graph) == 8


def test_a_kind_that_comes_often_takes_the_place_of_one_that_is_no_longer_used(small):
    found(small, ["a", "b"] * 5)
    has_graph, compiled = found(small, ["c", "d"] * 20)
    assert compiled == ["c", "d"]
    assert has_graph[-20:] == [True] * 20
    assert len(small) == 2


def test_structures_with_equal_leaves_are_of_different_kinds():
    x, y = tf.zeros([8, 3]), tf.zeros([8, 3])
    nests = [(x, y), [x, y], {"a": x, "b": y}, {"b": x, "c": y}, {"a": {"b": x}, "c": y}, ((x,), y), (x, (y,)), x]
    assert len({kind_of(nest) for nest in nests}) == len(nests)
    assert kind_of({"a": y, "b": x}) == kind_of(nests[2])
    assert len({kind_of(tf.zeros(shape, kind)) for shape in ((8, 3), (7, 3)) for kind in ("float32", "int64")}) == 4


class Named(keras.Model):
    """Takes a dict with `a`, and `b` or `c`, which count 1, 10 and 100."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

    def call(self, inputs):
        factors = {"a": 1.0, "b": 10.0, "c": 100.0}
        return self.dense(sum(factors[name] * value for name, value in inputs.items()))


@pytest.mark.usefixtures("session")
def test_data_of_another_structure_is_trained_on_as_what_it_is():
    """The names of the inputs differ, their shapes do not."""
    x, y = np.ones((8, 1), "float32"), np.zeros((8, 1), "float32")
    trainer = Trainer(Named(), keras.optimizers.SGD(0.0), "mse")
    losses = [
        trainer.fit({"a": x, other: x}, y, batch=8, verbose=0).history["loss"][0] for other in ("b", "c", "b", "c")
    ]
    assert losses == pytest.approx([11.0**2, 101.0**2] * 2)


class Halved(keras.layers.Layer):
    """Has a gradient of its own."""

    def call(self, inputs):
        @tf.custom_gradient
        def halved(x):
            return x, lambda dy: 0.5 * dy

        return halved(inputs)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.extended), 2])
@pytest.mark.usefixtures("session")
def test_a_graph_that_is_given_up_is_gone(accumulate, monkeypatch):
    """With all that it computes, in a loop over microbatches too: nothing else keeps it."""
    for name, value in (("MOST_GRAPHS", 1), ("PATIENCE", 4), ("OFTEN", 2)):
        monkeypatch.setattr(graph_cache, name, value)
    layers = [keras.Input((None, 2)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3), Halved()]
    trainer = Trainer(keras.Sequential(layers), "sgd", "mse", accumulate=accumulate)

    def fit(length):
        x = np.ones((64, length, 2), "float32")
        trainer.fit(x, np.zeros((64, 3), "float32"), batch=4, verbose=0, log_every=1)

    fit(5)
    (step,) = trainer.factory._known.values()
    (first,) = step._special._graphs.values()
    gone = [weakref.ref(first), weakref.ref(first.graph)]
    del first
    fit(7)
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert len(step._special) == 1


@pytest.mark.usefixtures("session")
def test_graphs_are_gone_with_their_trainer():
    """Else each of a search's models, or of the folds of a cross-validation, would stay in memory."""
    trainer = Trainer(keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)]), "sgd", "mse")
    trainer.fit(np.ones((8, 2), "float32"), np.zeros((8, 3), "float32"), batch=4, verbose=0)
    (step,) = trainer.factory._known.values()
    gone = [weakref.ref(function.graph) for function in step._special._graphs.values()]
    del trainer, step
    for _ in range(2):  # the second takes what the first has released
        gc.collect()
    assert gone
    assert {reference() for reference in gone} == {None}
