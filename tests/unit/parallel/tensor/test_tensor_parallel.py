"""Layers that are split among ranks compute, forward and backward, what the whole ones do; here on threads."""

import functools
import gc
import math
import re
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.compat.keras_variables import state_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.cuts import FusedHeads
from hvdtrain.parallel.tensor.losses import on_shards, reads_shards, sharded_form
from hvdtrain.parallel.tensor.outputs import Shard
from hvdtrain.parallel.tensor.parallelize import Parallelization
from hvdtrain.parallel.tensor.rules import DECODERS, LayoutRules, cut_along
from hvdtrain.runtime.placement import Ranges, drawn_apart, even_slice, placement_of
from hvdtrain.state.initial_values import build_lazily, materialize
from hvdtrain.state.named_tensors import values_in
from hvdtrain.state.train_state import TrainState
from tests.builders import compute_in
from tests.extended import mostly_extended
from tests.unit.threaded_exchange import Meeting, Replica, outcomes_on

pytestmark = pytest.mark.usefixtures("in_float64")

layers = keras.layers
ONE_AT_A_TIME = threading.Lock()
SIZE, BATCH, LENGTH, WIDTH = 2, 3, 4, 8
FUSED = {"c_attn/kernel": (None, FusedHeads(4, 4, 4)), "c_proj/kernel": ("tp", None)}
HEADS = {r"(query|key|value|gate)/kernel": (None, "tp", None), "attention_output/kernel": ("tp", None, None)}


def functional(shape, build, dtype="float64"):
    inputs = keras.Input(shape, dtype=dtype)
    return keras.Model(inputs, build(inputs))


def dense_pair(x):
    x = layers.Dense(WIDTH, name="before")(x)
    x = layers.Dense(6, activation="tanh", name="up", kernel_regularizer=keras.regularizers.L2(0.1))(x)
    return layers.Dense(5, activation="relu", name="down")(x)


def einsum_pair(x):
    x = layers.EinsumDense("abc,cde->abde", (None, 4, 3), bias_axes="de", name="up")(x)
    x = layers.EinsumDense("abde,dec->abc", (None, WIDTH), bias_axes="c", name="down")(x)
    return layers.EinsumDense("...x,xy->...y", 6, bias_axes="y", activation="relu", name="wide")(x)


def convolutions(x):
    x = layers.Conv2D(4, 3, padding="same", activation="relu", name="up")(x)
    return layers.Conv2D(3, 3, name="down")(x)


def pooled_convolutions(x):
    x = layers.Conv2D(4, 3, padding="same", activation="relu", name="up")(x)
    x = layers.ZeroPadding2D(1)(layers.UpSampling2D(2)(layers.MaxPooling2D(2)(x)))
    x = layers.AveragePooling2D(3, 2, padding="same")(keras.ops.flip(x, 1))
    x = keras.ops.cumsum(keras.ops.image.resize(x, (5, 5)), 2)
    return layers.Conv2D(3, 3, name="down")(x)


def pooled_sequences(x):
    x = layers.Conv1D(4, 3, padding="same", activation="relu", name="up")(x)
    x = layers.AveragePooling1D(2, 1)(layers.MaxPooling1D(2)(layers.UpSampling1D(2)(x)))
    x = keras.ops.squeeze(keras.ops.expand_dims(x, 1), 1)
    return layers.Conv1D(3, 2, name="down")(x)


class OwnAttention(layers.Layer):
    """Attention by hand, with a fused projection that counts heads first."""

    def __init__(self):
        super().__init__()
        self.qkv = layers.EinsumDense("btc,cdhe->btdhe", (None, 4, 3, 5), bias_axes="dhe", name="qkv")
        self.project = layers.Dense(WIDTH, name="project")

    def call(self, x):
        y = self.qkv(x)
        query, key, value = (tf.transpose(y[:, :, :, part], (0, 2, 1, 3)) for part in range(3))
        scores = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) / 5**0.5)
        y = tf.transpose(tf.matmul(scores, value), (0, 2, 1, 3))
        return self.project(tf.reshape(y, (-1, x.shape[1], y.shape[2] * y.shape[3])))


def own_attention(x):
    return OwnAttention()(x)


class Decoder(layers.Layer):
    """Attention by hand as in KerasHub, with heads first or last in its kernels, and masks made for activations."""

    def __init__(self, heads_first, **kwargs):
        super().__init__(**kwargs)
        equation, shape = ("btd,ndh->btnh", (None, 4, 3)) if heads_first else ("btd,dnh->btnh", (None, 4, 3))
        self.query = layers.EinsumDense(equation, shape, name="query")
        self.key = layers.EinsumDense(equation, (None, 2, 3), name="key")
        self.value = layers.EinsumDense(equation, (None, 2, 3), name="value")
        self.output_dense = layers.EinsumDense("btnh,nhd->btd", (None, WIDTH), name="attention_output")
        self.softmax = layers.Softmax(dtype="float64")
        self.num_query_heads, self.num_key_value_heads = 4, 2

    def call(self, x):
        query, key, value = self.query(x), self.key(x), self.value(x)
        batch, length = keras.ops.shape(query)[:2]
        groups = self.num_query_heads // self.num_key_value_heads
        query = keras.ops.reshape(query, (batch, length, self.num_key_value_heads, groups, 3))
        scores = keras.ops.einsum("btkgh,bskh->bkgts", query, key)
        lengths = keras.ops.arange(keras.ops.shape(x)[1])
        causal = lengths[:, None] >= lengths[None]
        seen = keras.ops.logical_and(keras.ops.any(x > -9.0, -1)[:, None, None, None], causal[None, None, None])
        seen = keras.ops.logical_and(keras.ops.ones_like(scores, dtype="bool"), seen)
        weights = self.softmax(scores, mask=seen)
        found = keras.ops.einsum("bkgts,bskh->btkgh", weights, value)
        return self.output_dense(keras.ops.reshape(found, (batch, length, self.num_query_heads, 3)))


def decoder(heads_first):
    return lambda x: Decoder(heads_first, name="attention")(x)


def embedded(x):
    return layers.Dense(3)(layers.Embedding(12, WIDTH, name="table")(x))


def tied(x):
    table = layers.ReversibleEmbedding(12, WIDTH, name="table")
    return table(layers.LayerNormalization()(table(x)), reverse=True)


def untied(x):
    table = layers.ReversibleEmbedding(12, WIDTH, tie_weights=False, logit_soft_cap=3.0, name="table")
    return table(table(x), reverse=True)


def masked_attention(x):
    y = layers.Embedding(12, WIDTH, mask_zero=True)(x)
    return y + layers.MultiHeadAttention(4, 3, value_dim=2, use_gate=False)(y, y)


def cross_attention(x):
    a, b = layers.Dense(WIDTH)(x), layers.Dense(WIDTH)(x)
    return layers.MultiHeadAttention(4, 3, dropout=0.0)(a, b, use_causal_mask=True)


def grouped_attention(x):
    y = layers.Dense(WIDTH)(x)
    return layers.GroupQueryAttention(3, 4, 2, use_gate=True)(y, y)


class FusedAttention(layers.Layer):
    """Attention as in nanoGPT, whose `take_apart` returns query, key and value [batch, length, heads, size]."""

    def __init__(self, heads, groups, size, take_apart, use_bias=True):
        super().__init__()
        self.size, self.group, self.take_apart = size, heads // groups, take_apart
        self.c_attn = layers.Dense((heads + 2 * groups) * size, use_bias=use_bias, name="c_attn")
        self.c_proj = layers.Dense(WIDTH, name="c_proj")

    def call(self, x):
        batch, length, _ = keras.ops.shape(x)
        qkv = self.c_attn(x)
        query, key, value = self.take_apart(qkv, batch, length, self.size)
        width = qkv.shape[-1] * self.group // (self.group + 2)
        if self.group > 1:
            key, value = (keras.ops.repeat(each, self.group, axis=2) for each in (key, value))
        query, key, value = (keras.ops.transpose(each, (0, 2, 1, 3)) for each in (query, key, value))
        scores = keras.ops.matmul(query, keras.ops.transpose(key, (0, 1, 3, 2))) / math.sqrt(self.size)
        y = keras.ops.matmul(keras.ops.softmax(scores, axis=-1), value)
        return self.c_proj(keras.ops.reshape(keras.ops.transpose(y, (0, 2, 1, 3)), (batch, length, width)))


def by_split(qkv, batch, length, size):
    return [keras.ops.reshape(each, (batch, length, -1, size)) for each in keras.ops.split(qkv, 3, axis=-1)]


def by_a_dim(qkv, batch, length, size):
    return keras.ops.unstack(keras.ops.reshape(qkv, (batch, length, 3, -1, size)), axis=2)


def by_index(qkv, batch, length, size):
    width = qkv.shape[-1] // 3
    blocks = (
        qkv[..., :width],
        qkv[:, :, width : 2 * width],
        keras.ops.slice(qkv, (0, 0, 2 * width), (qkv.shape[0] or batch, length, width)),
    )
    return [tf.reshape(each, (-1, length, width // size, size)) for each in blocks]


class KerasAttention(FusedAttention):
    """Attention by keras.ops, as in docs/tensor_parallel.md."""

    def call(self, x):
        batch, length, _ = keras.ops.shape(x)
        qkv = self.c_attn(x)
        width = qkv.shape[-1] // 3
        query, key, value = self.take_apart(qkv, batch, length, self.size)
        y = keras.ops.dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(keras.ops.reshape(y, (batch, length, width)))


def by_heads(qkv, batch, length, size):
    """With two queries for each key."""
    quarter = qkv.shape[-1] // size // 4
    heads = keras.ops.reshape(qkv, (batch, length, 4 * quarter, size))
    return tf.split(heads, [2 * quarter, quarter, quarter], axis=2)


def by_blocks(qkv, batch, length, size):
    """With two queries for each key."""
    quarter = qkv.shape[-1] // 4
    blocks = keras.ops.split(qkv, [2 * quarter, 3 * quarter], axis=-1)
    return [keras.ops.reshape(each, (batch, length, -1, size)) for each in blocks]


def fused(heads, groups, size, take_apart, **options):
    return lambda x: FusedAttention(heads, groups, size, take_apart, **options)(x)


def gated(x):
    gate, y = keras.ops.split(layers.Dense(12, name="gate_up")(x), 2, axis=-1)
    return layers.Dense(WIDTH, name="down")(keras.ops.silu(gate) * y)


def by_each_head(qkv, batch, length, size):
    """As in Megatron-LM: query, key and value of one head, and then those of the next one."""
    return keras.ops.split(keras.ops.reshape(qkv, (batch, length, -1, 3 * size)), 3, axis=-1)


def uneven(x):
    return layers.Dense(7, name="logits")(layers.Embedding(13, WIDTH, name="table")(x))


def uneven_and_tied(x):
    table = layers.ReversibleEmbedding(13, WIDTH, name="table")
    return table(layers.LayerNormalization()(table(x)), reverse=True)


TOKENS = np.random.default_rng(0).integers(0, 12, (BATCH, LENGTH)).astype("int32")
TOKENS[:, 0] = 0
ROWS = np.random.default_rng(1).standard_normal((BATCH, LENGTH, WIDTH))
IMAGES = np.random.default_rng(2).standard_normal((BATCH, 6, 6, 2))
CASES = {
    "dense": (dense_pair, ROWS, {"up/kernel": (None, "tp"), "down/kernel": ("tp", None)}),
    "einsum": (
        einsum_pair,
        ROWS,
        {"up/kernel": (None, "tp", None), "down/kernel": ("tp", None, None), "wide/kernel": (None, "tp")},
    ),
    "convolutions": (
        convolutions,
        IMAGES,
        {"up/kernel": (None, None, None, "tp"), "down/kernel": (None, None, "tp", None)},
    ),
    "pooled convolutions": (
        pooled_convolutions,
        IMAGES,
        {"up/kernel": (None, None, None, "tp"), "down/kernel": (None, None, "tp", None)},
    ),
    "pooled sequences": (pooled_sequences, ROWS, {"up/kernel": (None, None, "tp"), "down/kernel": (None, "tp", None)}),
    "attention by hand": (
        own_attention,
        ROWS,
        {"qkv/kernel": (None, "tp", None, None), "project/kernel": ("tp", None)},
    ),
    "heads first": (
        decoder(heads_first=True),
        ROWS,
        {"(query|key|value)/kernel": ("tp", None, None), "attention_output/kernel": ("tp", None, None)},
    ),
    "heads last": (
        decoder(heads_first=False),
        ROWS,
        {"(query|key|value)/kernel": (None, "tp", None), "attention_output/kernel": ("tp", None, None)},
    ),
    "vocabulary": (embedded, TOKENS, {"table": ("tp", None)}),
    "width": (embedded, TOKENS, {"table": (None, "tp")}),
    "tied": (tied, TOKENS, {"table": ("tp", None)}),
    "untied": (untied, TOKENS, {"table/embeddings": ("tp", None), "table/reverse": (None, "tp")}),
    "masked attention": (masked_attention, TOKENS, HEADS),
    "cross attention": (cross_attention, ROWS, HEADS),
    "grouped attention": (grouped_attention, ROWS, HEADS),
    "fused, split": (fused(4, 4, 3, by_split), ROWS, FUSED),
    "fused, a dim for the blocks": (
        fused(2, 2, 3, by_a_dim),
        ROWS,
        {**FUSED, "c_attn/kernel": (None, FusedHeads(2, 2, 2))},
    ),
    "fused, a head for each rank": (
        fused(2, 2, 3, by_split),
        ROWS,
        {**FUSED, "c_attn/kernel": (None, FusedHeads(2, 2, 2))},
    ),
    "fused, a key for each rank": (
        fused(4, 2, 3, by_blocks),
        ROWS,
        {"c_attn/kernel": (None, FusedHeads(4, 2, 2)), "c_proj/kernel": ("tp", None)},
    ),
    "fused, indexed": (fused(4, 4, 3, by_index, use_bias=False), ROWS, FUSED),
    "fused, grouped": (
        fused(4, 2, 3, by_heads),
        ROWS,
        {"c_attn/kernel": (None, FusedHeads(4, 2, 2)), "c_proj/kernel": ("tp", None)},
    ),
    "fused, by keras.ops": (lambda x: KerasAttention(4, 4, 3, by_split)(x), ROWS, FUSED),
    "fused, head by head": (
        fused(4, 4, 3, by_each_head),
        ROWS,
        {"c_attn/kernel": (None, "tp"), "c_proj/kernel": ("tp", None)},
    ),
    "gated": (gated, ROWS, {"gate_up/kernel": (None, FusedHeads(6, 6)), "down/kernel": ("tp", None)}),
    "uneven": (uneven, TOKENS, {"table": ("tp", None), "logits/kernel": (None, "tp")}),
    "uneven and tied": (uneven_and_tied, TOKENS, {"table": ("tp", None)}),
}


def whole_model(name):
    build, x, _ = CASES[name]
    with ONE_AT_A_TIME:  # they share Python's random numbers
        keras.utils.set_random_seed(5)
        return functional(x.shape[1:], build, x.dtype)


def gradients_of(model, x, weights):
    with tf.GradientTape() as tape:
        y = model(tf.constant(x), training=True)
        total = tf.reduce_sum(y * weights) + sum(model.losses)
    return y.numpy(), total.numpy(), tape.gradient(total, [v.value for v in model.trainable_variables])


INSTANCES = ("dense", "tied", "masked attention", "fused, grouped", "uneven")
ALIKE = {
    *("einsum", "pooled convolutions", "pooled sequences", "width", "untied", "uneven"),
    *(
        "heads last",
        "cross attention",
        "grouped attention",
        "fused, a key for each rank",
        "fused, grouped",
        "fused, head by head",
    ),
    *(f"fused, {how}" for how in ("a dim for the blocks", "a head for each rank", "indexed", "by keras.ops")),
}
"""Cases that are near to others."""
WAYS = mostly_extended(
    [*((name, "function") for name in CASES), *((name, way) for name in INSTANCES for way in ("instance", "stages"))],
    lambda name, way: (
        (way == "function" and name not in ALIKE) or (name, way) in {("tied", "instance"), ("uneven", "stages")}
    ),
    why="how values are cut does not depend on the kind of layer, nor fused heads on how their columns are taken apart",
)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_split_layer_is_the_whole_one(name, way):
    """Built by a function, whole before it is split, or by a function and without values, as for a pipeline."""
    x, rules = CASES[name][1:]
    whole = whole_model(name)
    weights = np.random.default_rng(3).standard_normal(whole(x).shape)
    y, total, gradients = gradients_of(whole, x, weights)
    meeting = Meeting(SIZE)

    def body(rank):
        compute_in("float64")
        build = whole_model(name) if way == "instance" else lambda: whole_model(name)
        split = lambda: Parallelization(Replica(meeting, rank), rules, None)(build, None)  # noqa: E731
        model = build_lazily(split) if way == "stages" else split()
        materialize(model.variables)
        return model, gradients_of(model, x, weights)

    for rank, (model, mine) in enumerate(outcomes_on(SIZE, body)):
        np.testing.assert_allclose(mine[0], y, rtol=1e-12, atol=1e-12)
        assert mine[1] == pytest.approx(total, rel=1e-12)
        cut = 0
        for variable, gradient, expected in zip(model.trainable_variables, mine[2], gradients, strict=True):
            placement = placement_of(variable)
            cut += placement is not None
            expected = np.array(tf.convert_to_tensor(expected))
            expected = expected if placement is None else values_in(expected, placement.box)
            np.testing.assert_allclose(
                tf.convert_to_tensor(gradient), expected, rtol=1e-11, atol=1e-11, err_msg=f"{rank} {variable.path}"
            )
            assert tuple(variable.shape) == tuple(variable.value.shape) == tuple(expected.shape)
        assert cut, "nothing was split"


class Unused:
    """The exchange of one of two ranks, for what is refused before anything is exchanged."""

    size, index, sends, by_host = 2, 1, True, None

    def all_reduce(self, tensor, *, name):
        return tf.identity(tensor)

    def all_gather(self, tensor, *, name):
        return tf.concat([tensor, tensor], 0)

    def all_to_all(self, tensor, *, name):
        return tf.identity(tensor)


def split(build, rules, inputs=None, **options):
    return Parallelization(Unused(), rules, None, **options)(build, inputs)


def refused(build, rules, *words, inputs=None, shape=(LENGTH, WIDTH), **options):
    made = build if isinstance(build, type) else lambda: functional(shape, build)
    with pytest.raises(ConfigError) as caught:
        split(made, rules, inputs, **options)
    for word in words:
        assert re.search(word, str(caught.value)), str(caught.value)
    assert not re.search(r"\x1b|Arguments received", str(caught.value)), str(caught.value)


DENSE = {"up/kernel": (None, "tp"), "down/kernel": ("tp", None)}


def between(function):
    return lambda x: layers.Dense(5, name="down")(function(layers.Dense(6, name="up")(x)))


class ScalesByWidth(keras.Model):
    def __init__(self):
        super().__init__()
        self.up, self.down = layers.Dense(6, name="up"), layers.Dense(5, name="down")

    def call(self, x):
        y = self.up(x)
        return self.down(y / y.shape[-1] ** 0.5)


class ScalesWhenCalled(ScalesByWidth):
    def call(self, x):
        y = self.up(x)
        return self.down(y / tf.sqrt(tf.cast(tf.shape(y)[-1], y.dtype)))


class Heads(keras.Model):
    """Several in training, as GoogLeNet has."""

    def __init__(self, main):
        super().__init__()
        self.up, self.down = layers.Dense(6, name="up"), layers.Dense(WIDTH, name="down")
        self.main, self.aux = layers.Dense(4, name=main), layers.Dense(3, name="aux")

    def call(self, x, training=False):
        x = self.down(self.up(x))
        return (self.main(x), self.aux(x)) if training else self.main(x)


class LossOfAFactor(layers.Layer):
    def build(self, shape):
        self.tau = self.add_weight(name="tau", shape=(), initializer="ones")

    def call(self, x):
        self.add_loss(0.1 * keras.ops.square(self.tau))
        return x * self.tau


class StandardizedConv1D(layers.Conv1D):
    """Weight standardization, as in BiT."""

    def convolution_op(self, inputs, kernel):
        mean, variance = keras.ops.moments(kernel, axes=[0, 1], keepdims=True)
        return super().convolution_op(inputs, (kernel - mean) / keras.ops.sqrt(variance + 1e-5))


class AttentionWithTemperature(layers.MultiHeadAttention):
    """As in keras.io/examples/vision/vit_small_ds."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tau = keras.Variable(math.sqrt(float(self._key_dim)), dtype=self.variable_dtype, name="tau")

    def _compute_attention(self, query, key, value, *args, **kwargs):
        return super()._compute_attention(keras.ops.multiply(query, 1.0 / self.tau), key, value, *args, **kwargs)


class Swish(layers.Layer):
    def __init__(self):
        super().__init__()
        self.beta = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x * keras.ops.sigmoid(self.beta * x)


class Mlp(layers.Layer):
    """As in Swin transformers: one dropout for both."""

    def __init__(self):
        super().__init__()
        self.fc1 = layers.Dense(6, activation="gelu", name="fc1")
        self.fc2 = layers.Dense(WIDTH, name="fc2")
        self.drop = layers.Dropout(0.1)

    def call(self, x):
        return self.drop(self.fc2(self.drop(self.fc1(x))))


class LossOfSlices(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x, axis=(0, 1)))
        return x


class Noise(layers.Layer):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def call(self, x, training=False):
        return x + 0.1 * self.draw(keras.ops.shape(x), dtype=x.dtype) if training else x


REFUSALS = {
    "no rules": (dense_pair, {}, ["Rules map regular expressions", "needs no hvdtrain.parallelize"]),
    "no regular expression": (dense_pair, {"up/(kernel": (None, "tp")}, ["is not a regular expression"]),
    "two rules": (dense_pair, {"p/kernel": (None, "tp"), "up/ker": (None, "tp")}, ["'up/kernel' is matched by two"]),
    "another rank": (
        dense_pair,
        {"up/kernel": (None, "tp", None)},
        [r"one entry for each dim of 'up/kernel'.*\(8, 6\)"],
    ),
    "matches nothing": (dense_pair, {**DENSE, "mlp": (None, "tp")}, ["'mlp' matches no variable", "before/kernel"]),
    "cuts nothing": (dense_pair, {"kernel": (None, None)}, ["No rule cuts", "tp=2"]),
    "features": (
        lambda x: layers.Dense(5, name="down")(layers.Dense(7, name="up")(x)),
        DENSE,
        ["tp=2 does not divide the features of 'down/kernel'", "7 on dim 0"],
    ),
    "heads": (
        lambda x: layers.MultiHeadAttention(5, 2, name="att")(x, x),
        HEADS,
        ["tp=2 does not divide the heads", "5 on dim 1"],
    ),
    "width": (
        lambda x: layers.Embedding(13, 5, name="table")(x),
        {"table/embeddings": (None, "tp")},
        ["does not divide the width", "5 on dim 1"],
    ),
    "heads of a block": (
        lambda x: layers.Dense(30, name="c_attn")(x),
        {"c_attn/kernel": (None, FusedHeads(4, 3, 3))},
        ["tp=2 does not divide the heads of each block of 'c_attn/kernel'", r"FusedHeads\(4, 3, 3\)"],
    ),
    "heads of another size": (
        lambda x: layers.Dense(36, name="c_attn")(x),
        {"c_attn/kernel": (None, FusedHeads(5, 5, 5))},
        ["15 heads", r"\(8, 36\)", "36 features on dim 1"],
    ),
    "heads of a row parallel layer": (
        dense_pair,
        {**DENSE, "down/kernel": (FusedHeads(2, 2, 2), None)},
        ["for the output of a layer", "Dense .*down"],
    ),
    "heads of a table": (
        tied,
        {"table": (FusedHeads(6, 6), None)},
        [r"FusedHeads\(6, 6\) is for the output", "ReversibleEmbedding"],
    ),
    "heads of attention that is not fused": (
        lambda x: layers.MultiHeadAttention(4, 2, name="att")(x, x),
        {**HEADS, r"(query|key|value|gate)/kernel": (None, FusedHeads(2, 2), None)},
        ["cut by heads", r"dim 1 by FusedHeads\(2, 2\)"],
    ),
    "blocks that are not taken apart": (
        lambda x: layers.Dense(5, name="down")(layers.Dense(6, name="up")(x)),
        {**DENSE, "up/kernel": (None, FusedHeads(2, 2, 2))},
        ["'down.* is given the output of Dense .up", "3 blocks side by side"],
    ),
    "other blocks": (
        lambda x: keras.ops.split(layers.Dense(8, name="up")(x), 4, axis=-1),
        {"up/kernel": (None, FusedHeads(4, 4))},
        ["mixes blocks of the output of Dense .up", "keras.ops.split"],
    ),
    "blocks under another order": (
        lambda x: keras.ops.reshape(layers.Dense(12, name="up")(x), (-1, LENGTH, 2, 3)),
        {"up/kernel": (None, FusedHeads(6, 6))},
        ["mixes blocks|is no slice"],
    ),
    "columns of a fused kernel": (
        fused(4, 4, 3, by_split),
        {**FUSED, "c_attn/kernel": (None, "tp")},
        ["needs the whole output of Dense '.*c_attn'", "Split"],
    ),
    "a scale by the width of a slice": (
        ScalesByWidth,
        DENSE,
        ["computes with a size", "2.4.* of the whole", "1.7.* of a slice"],
    ),
    "a scale by the width of a slice when it is called": (
        ScalesWhenCalled,
        DENSE,
        ["computes with a size", "6 of the whole, and 3 of a slice"],
    ),
    "heads that the code counts": (
        lambda x: layers.Dense(5, name="down")(
            keras.ops.reshape(keras.ops.reshape(layers.Dense(6, name="up")(x), (-1, LENGTH, 3, 2)), (-1, LENGTH, 6))
        ),
        DENSE,
        ["sizes such as the number of heads from the activation's shape, or write -1"],
    ),
    "a layer that nobody knows": (
        lambda x: layers.LSTM(4, name="memory")(x),
        {"memory/.*/kernel": (None, "tp")},
        ["LSTMCell .*memory", "cannot be split"],
    ),
    "a bias alone": (dense_pair, {"up/bias": ("tp",)}, ["The bias of Dense", "follows its kernel"]),
    "a bias along another dim": (
        lambda x: layers.EinsumDense("abc,cde->abde", (None, 4, 6), bias_axes="de", name="up")(x),
        {"up/kernel": (None, None, "tp"), "up/bias": ("tp", None)},
        ["bias 'up/bias' is cut like the output", "dim 1", "dim 0"],
    ),
    "attention by width": (
        lambda x: layers.MultiHeadAttention(4, 2, name="att")(x, x),
        {"query/kernel": (None, None, "tp")},
        ["MultiHeadAttention .att", "cut by heads", "dim 2"],
    ),
    "attention in part": (
        lambda x: layers.MultiHeadAttention(4, 2, name="att")(x, x),
        {"query/kernel": (None, "tp", None)},
        ["MultiHeadAttention .att", "key/kernel' whole"],
    ),
    "scores": (
        lambda x: layers.MultiHeadAttention(4, 2, name="att")(x, x, return_attention_scores=True)[0],
        HEADS,
        ["return_attention_scores"],
    ),
    "a reversible table by width": (tied, {"table": (None, "tp")}, ["cut along the vocabulary", "dim 1"]),
    "softmax inside": (
        lambda x: layers.Dense(6, activation="softmax", name="up")(x),
        {"up/kernel": (None, "tp")},
        ["The activation of Dense .up. looks at all of its 6 features"],
    ),
    "softmax between": (between(keras.ops.softmax), DENSE, ["needs the whole output of Dense .up", "Softmax"]),
    "a whole layer after columns": (
        between(layers.Dense(6, name="middle")),
        {"up/kernel": (None, "tp")},
        ["middle|whole output of Dense .up"],
    ),
    "a constraint": (
        lambda x: layers.Dense(6, kernel_constraint="max_norm", name="up")(x),
        {"up/kernel": (None, "tp")},
        ["constraint of 'up/kernel'"],
    ),
    "an orthogonal penalty": (
        lambda x: layers.Dense(6, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(), name="up")(x),
        {"up/kernel": (None, "tp")},
        ["regularizer of 'up/kernel'", "OrthogonalRegularizer"],
    ),
    "an activity regularizer": (
        lambda x: layers.Dense(6, activity_regularizer="l2", name="up")(x),
        {"up/kernel": (None, "tp")},
        ["activity regularizer of Dense .up"],
    ),
    "standardized kernels": (
        lambda x: StandardizedConv1D(3, 1, name="down")(layers.Conv1D(4, 1, name="up")(x)),
        {"up/kernel": (None, None, "tp"), "down/kernel": (None, "tp", None)},
        ["StandardizedConv1D"],
    ),
    "an activation with a weight": (
        lambda x: layers.Dense(5, name="down")(layers.Dense(6, activation=Swish(), name="up")(x)),
        DENSE,
        ["activation of Dense .up. has weights of its own, Swish"],
    ),
    "one dropout for slices and wholes": (
        lambda x: Mlp()(x),
        {"fc1/kernel": (None, "tp"), "fc2/kernel": ("tp", None)},
        ["random generator 'layers/mlp.*is used for shards|random generator .*is used for shards", "Use a layer"],
    ),
    "noise of TensorFlow's own": (
        lambda x: layers.Dense(5, name="down")(Noise(tf.random.normal)(layers.Dense(6, name="up")(x))),
        DENSE,
        ["draws at random for slices", "keras.random.SeedGenerator"],
    ),
    "a loss of a factor of slices": (
        lambda x: layers.Dense(5, name="down")(LossOfAFactor(name="factor")(layers.Dense(6, name="up")(x))),
        DENSE,
        ["'factor/tau' is used on slices and on whole activations|/tau' is used on slices"],
    ),
    "a loss of slices": (
        lambda x: layers.Dense(5, name="down")(LossOfSlices()(layers.Dense(6, name="up")(x))),
        DENSE,
        ["LossOfSlices .* adds a loss of which each rank has a slice"],
    ),
    "channels first": (
        lambda x: layers.Conv1D(4, 2, data_format="channels_first", name="up")(x),
        {"up/kernel": (None, None, "tp")},
        ["data_format='channels_first'"],
    ),
}


def test_rules_of_many_models_need_a_match_of_one():
    rules = LayoutRules(DECODERS, of_many=True)
    with pytest.raises(ConfigError, match="matches no variable of the model, which has dense/kernel"):
        rules.check_used(["dense/kernel"])
    assert rules.cut_of("backbone/token_embedding/embeddings", (8, 4), 0, 2).dim == 0
    joined_heads = rules.cut_of("transformer_layer_0/self_attention/attention_output/kernel", (8, 8), 0, 2)
    assert joined_heads is None, "the kernel of GPT-NeoX"
    rules.check_used(["backbone/token_embedding/embeddings"])
    with pytest.raises(ConfigError, match="matches no variable of the model"):
        LayoutRules(DECODERS).check_used(["backbone/token_embedding/embeddings"])


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_split_is_refused_by_name(name):
    build, rules, words = REFUSALS[name]
    refused(
        build,
        rules,
        *words,
        inputs=ROWS if isinstance(build, type) else None,
        shape=(LENGTH,) if name in ("width", "a reversible table by width", "heads of a table") else (LENGTH, WIDTH),
    )


class ReadsTheTable(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(12, WIDTH, name="table")

    def call(self, tokens):
        return tf.matmul(self.table(tokens), self.table.embeddings, transpose_b=True)


class Loops(keras.Model):
    def __init__(self):
        super().__init__()
        self.up = layers.Dense(6, name="up")

    def call(self, x):
        return tf.map_fn(self.up, x)


class CountsFeatures(keras.Model):
    def __init__(self):
        super().__init__()
        self.up = layers.Dense(6, name="up")

    def call(self, x):
        y = self.up(x)
        return y * tf.cast(tf.range(tf.shape(y)[-1]), y.dtype)


class Reshapes(keras.Model):
    """Counts its heads once and for all."""

    def __init__(self):
        super().__init__()
        self.up = layers.Dense(24, name="up")

    def call(self, x):
        return tf.reduce_sum(tf.reshape(self.up(x), (-1, LENGTH, 4, tf.shape(self.up(x))[-1] // 4)), -1)


def test_a_model_of_ones_own_class_is_followed():
    refused(ReadsTheTable, {"table": ("tp", None)}, "reads 'table/embeddings'", "ReversibleEmbedding", inputs=TOKENS)
    refused(Loops, {"up/kernel": (None, "tp")}, "within a loop, a branch or a tf.function", inputs=ROWS)
    refused(CountsFeatures, {"up/kernel": (None, "tp")}, "needs the whole output of Dense .*up", "Mul", inputs=ROWS)
    refused(Reshapes, {"up/kernel": (None, "tp")}, "needs the whole output|no slice along one dim", inputs=ROWS)
    refused(Loops, {"up/kernel": (None, "tp")}, "has no variables before it is called", "inputs=")


class CountsNoHeads(keras.Model):
    """Writes -1 for the sizes of which a rank has a part, and takes the number of samples from its input."""

    def __init__(self):
        super().__init__()
        self.up, self.down = layers.Dense(24, name="up"), layers.Dense(WIDTH, name="down")

    def call(self, x):
        samples, length, _ = keras.ops.shape(x)
        heads = keras.ops.reshape(self.up(x), (samples, length, -1, 3))
        return self.down(keras.ops.reshape(keras.ops.tanh(heads), (samples, length, -1)))


def test_a_model_of_ones_own_class_may_leave_out_the_sizes_of_slices():
    model = split(CountsNoHeads, {"up/kernel": (None, "tp"), "down/kernel": ("tp", None)}, ROWS)
    assert [tuple(v.shape) for v in model.trainable_variables] == [(WIDTH, 12), (12,), (12, WIDTH), (WIDTH,)]
    assert model(ROWS).shape == ROWS.shape


def test_a_model_is_split_once_and_before_it_is_trained():
    model = split(lambda: functional((LENGTH, WIDTH), dense_pair), DENSE)
    with pytest.raises(ConfigError, match=r"up/kernel.* is split among the ranks already"):
        split(model, DENSE)
    model = functional((LENGTH, WIDTH), dense_pair)
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(ConfigError, match="was built for whole variables"):
        split(model, DENSE)
    with pytest.raises(ConfigError, match="A Keras model, or a function that builds one"):
        split(lambda: 3, DENSE)


@pytest.mark.parametrize("method", ["save", "save_weights", "export"])
def test_a_file_of_slices_is_not_written(method, tmp_path):
    model = split(lambda: functional((LENGTH, WIDTH), dense_pair), DENSE)
    with pytest.raises(ConfigError, match=rf"model.{method}\(\) would write the slices of one rank.*checkpoint export"):
        getattr(model, method)(str(tmp_path / "model.weights.h5"))


class AppliesTwice(keras.Model):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


@pytest.mark.usefixtures("session")
def test_a_layer_that_is_given_a_slice_of_its_input_is_named():
    both = {"up/kernel": (None, "tp"), "down/kernel": (None, "tp")}
    slice_arrives = r"the whole is needed, at 'down': cut that along its input, by 'down/kernel': \('tp', None\)"
    refused(between(lambda x: x), both, slice_arrives)
    whole_arrives = r"the whole of an activation arrives at 'up', which takes a slice of it, by 'up/kernel'"
    refused(between(lambda x: x), {"up/kernel": ("tp", None)}, whole_arrives)


def test_what_a_split_model_cannot_do_yet_is_refused():
    def build():
        inputs = keras.Input((LENGTH, WIDTH))
        model = AppliesTwice(inputs, dense_pair(inputs))
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ConfigError, match=r"train_step of AppliesTwice.* does not go with the model .* which is split"):
        hvdtrain.Trainer(split(build, DENSE)).fit(ROWS, split(build, DENSE)(ROWS), batch=2, verbose=0)
    state = TrainState(split(lambda: functional((LENGTH, WIDTH), dense_pair), DENSE), keras.optimizers.SGD(), 0)
    state.held_weights = {"best/0": np.zeros(3)}
    with pytest.raises(ConfigError, match=r"A callback holds weights \(restore_best_weights=True\)"):
        state.saved_tensors()


SEQUENCE = {
    r"att/(query|key|value)/kernel": (None, "tp", None),
    "att/attention_output/kernel": ("tp", None, None),
    "table/output": (None, "tp", None),
    "last/output": (None, None, None),
}


def sequence_block(x):
    x = layers.Embedding(12, WIDTH, name="table")(x)
    x = x + layers.MultiHeadAttention(4, 2, name="att")(*[layers.LayerNormalization(name="first")(x)] * 2)
    return layers.Dense(3)(layers.LayerNormalization(name="last")(x))


def test_slices_of_the_sequence():
    """Norms see slices and get parts of their gradients, as does the bias behind a row parallel product."""
    model = split(lambda: functional((LENGTH,), sequence_block, "int32"), SEQUENCE, sequence=True)
    parts = {v.path for v in model.variables if (p := placement_of(v)) is not None and p.summed_over == ("tp",)}
    norms = {f"{name}/{variable}" for name in ("first", "last") for variable in ("gamma", "beta")}
    assert parts == {*norms, "att/attention_output/bias"}
    tokens = {"shape": (LENGTH,), "sequence": True}

    def build(x):
        return sequence_block(keras.ops.cast(x, "int32"))

    without = {path: layout for path, layout in SEQUENCE.items() if not path.endswith("output")}
    refused(build, without, "sequence_parallel needs a rule", "embeddings/output", **tokens)
    unending = {path: layout for path, layout in SEQUENCE.items() if path != "last/output"}
    again = r"whole output of Embedding 'table' \(by its output rule\).* before, by a rule .LAYER/output.: \(None"
    refused(build, unending, again, **tokens)
    refused(build, {**SEQUENCE, "table/output": ("tp", None, None)}, "cut along the sequence", **tokens)
    refused(build, SEQUENCE, "tp=2 must divide", r"\(None, 5, 8\)", shape=(5,), sequence=True)
    late = {**unending, "last/output": (None, "tp", None), "table/output": (None, None, None)}
    refused(build, late, "needs its input sharded|is given a whole activation|is cut along its input", **tokens)


class Counted(keras.initializers.Initializer):
    """Counts how many whole values that it drew are in memory."""

    alive, most = [], 0

    def __call__(self, shape, dtype=None):
        gc.collect()
        value = tf.random.normal(shape, dtype=dtype)
        self.alive.append(weakref.ref(value))
        type(self).most = max(self.most, sum(ref() is not None for ref in self.alive))
        return value

    def get_config(self):
        return {}


@pytest.mark.extended  # builds a deep model; slices of single layers are looked at every day
def test_no_more_than_one_variable_is_whole_at_a_time():
    def deep(x):
        for number in range(6):
            x = layers.Dense(
                WIDTH, kernel_initializer=Counted(), name=f"up{number}" if number % 2 == 0 else f"down{number}"
            )(x)
        return x

    gc.freeze()  # what is there already need not be looked through each time
    try:
        model = split(
            lambda: functional((LENGTH, WIDTH), deep), {r"up\d/kernel": (None, "tp"), r"down\d/kernel": ("tp", None)}
        )
        gc.collect()
    finally:
        gc.unfreeze()
    assert Counted.most == 1
    assert {int(np.prod(v.shape)) for v in model.trainable_variables if v.path.endswith("kernel")} == {
        WIDTH * WIDTH // 2
    }
    assert not [ref for ref in Counted.alive if ref() is not None], "a whole value is still there"
    assert not any(state_of(variable) for variable in model.variables)


def test_a_layer_that_the_model_does_not_use_is_left_alone():
    def build():
        functional((LENGTH, WIDTH), lambda x: layers.Dense(6, name="up_unused")(x))
        return functional((LENGTH, WIDTH), dense_pair)

    model = split(build, {r"up.*/kernel": (None, "tp"), "down/kernel": ("tp", None)})
    up = next(variable for variable in model.variables if variable.path == "up/kernel")
    assert tuple(up.shape) == (WIDTH, 3)


def test_values_that_a_builder_assigns_are_cut():
    def build():
        model = functional((LENGTH, WIDTH), dense_pair)
        assert [tuple(v.shape) for v in model.trainable_variables][2] == (WIDTH, 6), "the builder sees whole variables"
        for variable in model.trainable_variables:
            variable.assign(np.arange(np.prod(variable.shape), dtype="float64").reshape(variable.shape))
        return model

    model = split(build, DENSE)
    up = next(variable for variable in model.variables if variable.path == "up/kernel")
    np.testing.assert_array_equal(up.numpy(), np.arange(48.0).reshape(8, 6)[:, 3:])

    def reads():
        model = build()
        model.get_layer("up").get_weights()
        return model

    with pytest.raises(ConfigError, match="'up/kernel' is made as a slice, and was given another value"):
        split(reads, DENSE)


def test_draws_and_gradients_of_what_is_whole():
    """Dropout on slices draws apart, and a factor that all ranks share gets a part of its gradient on each."""

    def build():
        inputs = keras.Input((LENGTH, WIDTH))
        x = layers.Dropout(0.5, name="of_all")(inputs)
        x = layers.PReLU(shared_axes=[1, 2], name="slope")(layers.Dense(6, name="up")(x))
        x = layers.Dropout(0.5, name="of_slices")(x)
        return keras.Model(inputs, layers.Dense(5, name="down")(x))

    model = split(build, DENSE)
    assert placement_of(model.get_layer("slope").alpha).summed_over == ("tp",)
    apart = {name: drawn_apart(model.get_layer(name).seed_generator.state) for name in ("of_all", "of_slices")}
    assert apart == {"of_all": None, "of_slices": 1}


def test_outputs_may_differ_in_training_and_in_inference_where_they_are_whole():
    x = np.ones((BATCH, WIDTH))
    split(lambda: Heads("main"), DENSE, inputs=x)
    with pytest.raises(ConfigError, match="in training or in inference alone"):
        split(lambda: Heads("logits"), {**DENSE, "logits/kernel": (None, "tp")}, inputs=x)


def slope(x):
    x = layers.PReLU("ones", keras.regularizers.L2(0.3), shared_axes=[1, 2], name="slope")(
        layers.Dense(6, name="up")(x)
    )
    return layers.Dense(5, name="down")(x)


def temperature(x):
    return AttentionWithTemperature(4, 2, name="att")(x, x)


@pytest.mark.parametrize(
    ("build", "rules", "path"), [(slope, DENSE, "slope/alpha"), (temperature, HEADS, "att/tau")], ids=["slope", "tau"]
)
def test_gradients_of_whole_factors_on_slices_are_parts_of_a_sum(build, rules, path):
    """Also where the factor has a penalty, which every rank knows whole: its gradient counts once."""

    def made():
        with ONE_AT_A_TIME:
            keras.utils.set_random_seed(5)
            return functional((LENGTH, WIDTH), build)

    def gradient(model):
        factor = next(v for v in model.trainable_variables if v.path.endswith(path.rpartition("/")[2]))
        with tf.GradientTape() as tape:
            outputs = model(tf.constant(ROWS), training=True)
            penalty = tf.add_n([tf.zeros([], tf.float64), *model.losses])
            weights = np.random.default_rng(3).standard_normal(outputs.shape)
            total = tf.reduce_sum(outputs * weights) + penalty
        return penalty.numpy(), tape.gradient(total, factor.value).numpy(), placement_of(factor)

    penalty, expected, _ = gradient(made())
    meeting = Meeting(SIZE)

    def body(rank):
        compute_in("float64")
        return gradient(Parallelization(Replica(meeting, rank), rules, None)(made, None))

    found = outcomes_on(SIZE, body)
    assert [each for each, _, _ in found] == pytest.approx([penalty] * SIZE, rel=1e-12)
    assert all(placement.summed_over == ("tp",) for _, _, placement in found)
    np.testing.assert_allclose(sum(part for _, part, _ in found), expected, rtol=1e-11)


CLASSES = 7
OWN = [even_slice(CLASSES, SIZE, rank) for rank in range(SIZE)]
LABELS = np.random.default_rng(6).integers(0, CLASSES, (BATCH, LENGTH))
LOGITS = np.random.default_rng(7).standard_normal((BATCH, LENGTH, CLASSES)) * 5
LOGITS[0, 0] = LOGITS[0, 0, 0]  # equal ones: the first wins
SOFT = np.random.default_rng(8).random((BATCH, LENGTH, CLASSES))
IGNORED = np.where(LABELS == 2, -1, LABELS)
losses = keras.losses
LOSSES = {
    "sparse": (losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"), LABELS),
    "sparse [..., 1]": (losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"), LABELS[..., None]),
    "ignored": (losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1, reduction="none"), IGNORED),
    "dense": (losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1, reduction="none"), SOFT),
    "function": (functools.partial(losses.sparse_categorical_crossentropy, from_logits=True), LABELS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_cross_entropy_of_slices_is_that_of_all_logits(name):
    loss, targets = LOSSES[name]
    call = loss.call if isinstance(loss, losses.Loss) else loss
    weights = np.random.default_rng(9).random((BATCH, LENGTH))
    with tf.GradientTape() as tape:
        logits = tf.constant(LOGITS)
        tape.watch(logits)
        expected = call(targets, logits)
        total = tf.reduce_sum(expected * weights)
    slope = tape.gradient(total, logits).numpy()
    meeting = Meeting(SIZE)

    def body(rank):
        form = sharded_form(loss, Shard(Replica(meeting, rank), CLASSES))
        with tf.GradientTape() as tape:
            mine = tf.constant(LOGITS[..., OWN[rank]])
            tape.watch(mine)
            values = form(tf.constant(targets), mine)
            total = tf.reduce_sum(values * weights)
        return values, tape.gradient(total, mine)

    for rank, (values, gradient) in enumerate(outcomes_on(SIZE, body)):
        np.testing.assert_allclose(values, expected, rtol=1e-12)
        np.testing.assert_allclose(gradient, slope[..., OWN[rank]], rtol=1e-11, atol=1e-13)
        assert (getattr(values, "_keras_mask", None) is None) == (name != "ignored")


def test_losses_that_need_whole_logits_have_no_form_for_slices():
    shard = Shard(Unused(), CLASSES)
    assert sharded_form(losses.SparseCategoricalCrossentropy(from_logits=False), shard) is None
    assert sharded_form(losses.MeanSquaredError(), shard) is None
    assert sharded_form(lambda y, z: z, shard) is None


def test_a_label_that_no_rank_knows_is_refused_on_all():
    meeting = Meeting(SIZE)

    def body(rank):
        form = sharded_form(LOSSES["sparse"][0], Shard(Replica(meeting, rank), CLASSES))
        try:
            form(tf.constant([[CLASSES]]), tf.zeros((1, 1, len(range(CLASSES)[OWN[rank]])), tf.float64))
        except tf.errors.InvalidArgumentError:
            return True

    assert outcomes_on(SIZE, body) == [True, True]


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_an_accuracy_of_slices_is_that_of_all_logits(kind):
    targets = LABELS if kind == "sparse" else SOFT
    make = keras.metrics.SparseCategoricalAccuracy if kind == "sparse" else keras.metrics.CategoricalAccuracy
    whole = make()
    whole.update_state(targets, LOGITS)
    meeting = Meeting(SIZE)

    def body(rank):
        metric, shard = make(), Shard(Replica(meeting, rank), CLASSES)
        assert reads_shards(metric)
        with on_shards(metric, shard):
            metric.update_state(targets, tf.constant(LOGITS[..., OWN[rank]]))
        assert metric._fn is whole._fn
        return float(metric.result())

    assert outcomes_on(SIZE, body) == [float(whole.result())] * SIZE
    assert not reads_shards(keras.metrics.SparseTopKCategoricalAccuracy())


def test_rules_are_searched_as_keras_does():
    rules = LayoutRules({"dense.*kernel": (None, "tp"), "dense_2/kernel": ("tp", None), "norm": (None,)})
    assert rules.cut_of("model/dense_1/kernel", (2, 4), 0, 2).dim == 1
    assert rules.cut_of("dense_2/kernel", (2, 4), 0, 2).dim == 0, "the whole path comes first"
    assert rules.cut_of("dense_1/bias", (4,), 0, 2) is None
    assert rules.cut_of("norm/gamma", (4,), 0, 2) is None
    rules.check_used([])
    assert cut_along("x", (4, 6), 1, 1, 3).region == (slice(0, 4), slice(2, 4))
    assert cut_along("embeddings", (5, 6), 0, 1, 2).region == (slice(3, 5), slice(0, 6))
    cut = cut_along("c_attn/kernel", (4, 16), 1, 1, 2, FusedHeads(4, 2, 2))
    assert (cut.blocks, cut.length, cut.shape) == ((4, 2, 2), 8, (4, 8))
    assert cut.region == (slice(0, 4), Ranges((slice(4, 8), slice(10, 12), slice(14, 16))))
