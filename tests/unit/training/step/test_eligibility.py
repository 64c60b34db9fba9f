"""Code of a user's own computes with the whole batch, or is refused or named with what keeps it from that."""

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import as_batch
from hvdtrain.layers.experts import MixtureOfExperts
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.eligibility import has_rows, refuse_own_step, sees_whole_batch, warning_of_own_parts

layers = keras.layers


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class Centered(layers.Layer):
    def call(self, inputs: Any) -> Any:
        return inputs - keras.ops.mean(inputs, 0)


def own_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean((y_true - y_pred) ** 2, -1)


def model(kind: type = keras.Model, *more: Any, loss: Any = "mse", metrics: Any = ()) -> keras.Model:
    inputs = keras.Input((3,))
    outputs = layers.Dense(2)(inputs)
    for layer in more:
        outputs = layer(outputs)
    made = kind(inputs, outputs)
    made.compile("sgd", loss, metrics=list(metrics))
    return made


def backend(size: int = 2, name: str = "horovod", **axes: int) -> Any:
    return SimpleNamespace(name=name, size=size, axes={"dp": size, **axes})


OBSTACLES = [
    ({"jit": True}, {}, r"jit=True"),
    ({"local_steps": 2}, {}, r"local_steps=2"),
    ({"update": "async"}, {}, r"update='async'"),
    ({"update": "gossip"}, {}, r"update='gossip'"),
    ({"reduce_op": "sum"}, {}, r"reduce_op='sum'"),
    ({}, {"name": "mirrored"}, r"backend='mirrored'"),
    ({}, {"tp": 2}, r"tp of parallel"),
    ({}, {"cp": 2}, r"cp of parallel"),
]


@pytest.mark.parametrize(("options", "of_backend", "named"), OBSTACLES)
def test_what_keeps_a_step_from_the_whole_batch_is_named(options, of_backend, named):
    chosen = StepOptions(**options)
    assert not sees_whole_batch(backend(**of_backend), model(OwnStep), chosen)
    with pytest.raises(
        ConfigError, match=rf"(?s)The step of OwnStep is its own.*not with .*{named}.*whole_batch=False"
    ):
        refuse_own_step(backend(**of_backend), model(OwnStep), chosen, has_rows=True)
    said = warning_of_own_parts(backend(**of_backend), model(keras.Model, Centered()), chosen, has_rows=True)
    assert said.startswith("warning: with ")
    assert "layer Centered 'centered" in said


def test_layers_that_exchange_and_ragged_inputs_keep_it_from_that_too():
    options = StepOptions()
    experts = model(OwnStep, MixtureOfExperts(2, 4))
    with pytest.raises(ConfigError, match=r"MixtureOfExperts '.*', which exchanges by itself"):
        refuse_own_step(backend(), experts, options, has_rows=True)
    ragged = as_batch((tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.zeros((2, 1))), 1.0, 2)
    assert not has_rows(ragged)
    with pytest.raises(ConfigError, match="ragged or sparse inputs"):
        refuse_own_step(backend(), model(OwnStep), options, has_rows=has_rows(ragged))


def test_the_nodes_and_edges_of_graphs_are_no_rows_of_samples():
    nodes, edges, targets = np.zeros((7, 2)), np.zeros((9, 2), "int32"), np.zeros((3, 1))
    assert not has_rows(as_batch(({"nodes": nodes, "edges": edges}, targets), 1.0, 3))
    assert not has_rows(as_batch((nodes[:3], np.array(1.0)), 1.0, 3))
    assert has_rows(as_batch(({"nodes": nodes[:3], "more": edges[:3]}, targets), 1.0, 3))


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: model(loss=own_loss), "loss own_loss"),
        (lambda: model(metrics=[own_loss]), "metric"),
        (lambda: model(keras.Model, layers.Lambda(lambda x: x)), "layer Lambda"),
        (lambda: model(keras.Model, lambda x: x - keras.ops.mean(x, 0)), "operation "),
        (lambda: model(keras.Model, layers.Dense(2, activation=lambda x: x)), "layer Dense"),
    ],
)
def test_losses_metrics_layers_and_operations_of_ones_own_are_named(made, named):
    assert sees_whole_batch(backend(), made(), StepOptions())
    assert named in warning_of_own_parts(backend(), made(), StepOptions(jit=True), has_rows=True)


def test_nothing_is_said_where_it_is_meant_or_makes_no_difference():
    own, options = model(OwnStep, Centered()), StepOptions(jit=True)
    for where, chosen in ((backend(), StepOptions(jit=True, whole_batch=False)), (backend(size=1), options)):
        refuse_own_step(where, own, chosen, has_rows=True)
        assert not warning_of_own_parts(where, own, chosen, has_rows=True)
    assert not warning_of_own_parts(backend(), model(), options, has_rows=True), "Keras' own layers and losses"
    assert not sees_whole_batch(backend(), model(), StepOptions())
    assert not sees_whole_batch(backend(), own, StepOptions(whole_batch=False))
    assert has_rows(as_batch((np.zeros((2, 1)), None), 1.0, 2))


def test_on_one_rank_microbatches_are_batches():
    assert sees_whole_batch(backend(size=1, name="single"), model(OwnStep), StepOptions(accumulate=2))
    assert not sees_whole_batch(backend(size=1, name="single"), model(OwnStep), StepOptions())
