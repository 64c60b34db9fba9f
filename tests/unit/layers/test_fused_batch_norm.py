"""The fused op gives what Keras' batch normalization gives, where it is used."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.layers.fused_batch_norm import fused_normalization, fusible_layers

KINDS = {
    "images": ((8, 5, 4, 3), {}),
    "vectors": ((32, 3), {"momentum": 0.9}),
    "series": ((8, 6, 3), {"epsilon": 1e-5, "axis": 2}),
    "volumes": ((4, 3, 2, 2, 3), {}),
    "no scale": ((8, 5, 4, 3), {"scale": False}),
    "no center": ((8, 5, 4, 3), {"center": False}),
    "one value": ((1, 3), {}),
}


def layer_of(shape, arguments, policy="float32"):
    layer = keras.layers.BatchNormalization(**arguments, dtype=policy)
    layer.build(shape)
    random = np.random.default_rng(1)
    for weight in layer.weights:
        weight.assign(random.uniform(0.5, 1.5, weight.shape))
    return layer


def outcome(shape, arguments, *, fused, policy="float32", training=True, mask=None):
    """Outputs, gradients and statistics of a training step, and the types of its ops."""
    layer = layer_of(shape, arguments, policy)
    random = np.random.default_rng(2)
    inputs = tf.constant(random.normal(3.0, 2.0, shape), layer.compute_dtype)
    weights = tf.constant(random.normal(size=shape), layer.compute_dtype)

    @tf.function
    def run():
        with fused_normalization(fusible_layers(layer) if fused else []), tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=training, mask=mask)
            total = tf.reduce_sum(outputs * weights)
        return outputs, *tape.gradient(total, [inputs, *layer.trainable_weights])

    graph = run.get_concrete_function().graph
    values = [tf.cast(value, tf.float64).numpy() for value in run()]
    return [*values, *(np.asarray(w, "float64") for w in layer.non_trainable_weights)], ops_of(graph)


def ops_of(graph):
    definition = graph.as_graph_def()
    return {node.op for node in [*definition.node, *(n for f in definition.library.function for n in f.node_def)]}


def equal(mine, theirs, tolerance):
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_keras_s_own_but_for_rounding(kind):
    shape, arguments = KINDS[kind]
    (mine, ops), (theirs, _) = (outcome(shape, arguments, fused=fused) for fused in (True, False))
    assert "FusedBatchNormV3" in ops
    equal(mine, theirs, 2e-6)


@pytest.mark.parametrize(("policy", "tolerance"), [("mixed_float16", 2e-3), ("mixed_bfloat16", 2e-2)])
def test_sixteen_bits_are_rounded_once(policy, tolerance):
    shape, arguments = KINDS["images"]
    (mine, ops), (theirs, _) = (outcome(shape, arguments, fused=fused, policy=policy) for fused in (True, False))
    assert "FusedBatchNormV3" in ops
    equal(mine, theirs, tolerance)


@pytest.mark.parametrize(
    "how",
    [
        {"training": False},
        {"policy": "float64"},
        {"mask": np.tri(8, 5, dtype=bool)[:, :, None] & np.ones((1, 1, 4), bool)},
        {"arguments": {"axis": 1}},
        {"arguments": {"epsilon": 1e-7}},
        {"arguments": {"renorm": True}},
    ],
    ids=lambda how: next(iter(how.values())) if "arguments" in how else next(iter(how)),
)
def test_everything_else_stays_as_it_is(how):
    shape, arguments = KINDS["images"][0], how.pop("arguments", {})
    (mine, ops), (theirs, _) = (outcome(shape, arguments, fused=fused, **how) for fused in (True, False))
    assert "FusedBatchNormV3" not in ops
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_frozen_layer_keeps_its_statistics():
    layer = layer_of((8, 3), {})
    layer.trainable = False
    before = [w.numpy() for w in layer.weights]
    with fused_normalization(fusible_layers(layer)):
        layer(np.ones((8, 3), "float32"), training=True)
    assert all(np.array_equal(w, b) for w, b in zip(layer.weights, before, strict=True))


def test_the_trainer_normalizes_by_the_op(session, monkeypatch):
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    calls, op = [], tf.raw_ops.FusedBatchNormV3
    monkeypatch.setattr(tf.raw_ops, "FusedBatchNormV3", lambda **given: calls.append(given) or op(**given))
    data = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    hvdtrain.Trainer(model, "sgd", "mse").fit(data, batch=8, verbose=False)
    assert calls
