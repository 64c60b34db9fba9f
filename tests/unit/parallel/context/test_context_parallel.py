"""Models that are given slices of sequences compute what they do for whole ones, or are refused; here on threads."""

import re
import threading
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.compat.keras import build_from
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.context.positions import Positions, PositionSlices, belonging, positions_of, with_positions
from hvdtrain.parallel.context.split import separated, split_sequences
from hvdtrain.parallel.outputs import local_outputs
from hvdtrain.runtime.placement import drawn_for_samples
from hvdtrain.training.step.checks import check_positions
from tests.builders import compute_in
from tests.extended import mostly_extended
from tests.unit.threaded_exchange import Meeting, Replica, outcomes_on

pytestmark = pytest.mark.usefixtures("in_float64")

layers, ops = keras.layers, keras.ops
ONE_AT_A_TIME = threading.Lock()
SIZE, BATCH, LENGTH, WIDTH, WORDS = 2, 3, 8, 8, 12


class TokenAndPositionEmbedding(layers.Layer):
    """As in keras.io/examples/generative/text_generation_with_miniature_gpt."""

    def __init__(self, maxlen, vocab_size, embed_dim, **kwargs):
        super().__init__(**kwargs)
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        maxlen = ops.shape(x)[-1]
        positions = ops.arange(0, maxlen, 1)
        return self.token_emb(x) + self.pos_emb(positions)


def gpt(tokens):
    x = TokenAndPositionEmbedding(LENGTH, WORDS, WIDTH)(tokens)
    y = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(0.0)(y))
    y = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(WIDTH)])(x)
    return layers.Dense(WORDS)(layers.LayerNormalization()(x + y))


def masked(tokens):
    """A mask of padding, and dropout in the attention, whose scores are then computed in another way."""
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(tokens)
    x = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True) + x
    attention = layers.MultiHeadAttention(4, 2, value_dim=3, dropout=1e-9)
    return attention(x, x)


def grouped(tokens):
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    y = layers.GroupQueryAttention(3, 4, 2, use_gate=True)(x, x, use_causal_mask=True)
    return layers.UnitNormalization()(layers.EinsumDense("abc,cde->abde", (None, 4, 3), bias_axes="de")(y))


def tied(tokens):
    table = layers.ReversibleEmbedding(WORDS, WIDTH, mask_zero=True)
    x = table(tokens)
    return table(x + layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True), reverse=True)


def with_a_mask_of_its_own(tokens):
    """Every position sees those before the one after it."""
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    mask = np.tril(np.ones((1, LENGTH, LENGTH), bool), 1)
    return layers.MultiHeadAttention(2, 4)(x, x, attention_mask=mask)


def rows(x):
    """Inputs that are no tokens, a table of positions, and a number of each sample."""
    x = layers.Dense(WIDTH, name="patches")(x)
    return layers.MultiHeadAttention(2, 4)(x, layers.Activation("gelu")(x))


def experts(tokens):
    """Tokens that choose their experts by themselves, between layers that look at all of them."""
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    x = x + layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    return x + hvdtrain.MixtureOfExperts(4, 8, top_k=2, capacity_factor=None, seed=3)(x)


TOKENS = np.random.default_rng(0).integers(1, WORDS, (BATCH, LENGTH)).astype("int32")
PADDED = np.where(np.arange(LENGTH) < np.array([[8], [5], [3]]), TOKENS, 0)
ROWS = np.random.default_rng(1).standard_normal((BATCH, LENGTH, 5))
PATCHES = {"patches/output": (None, "cp", None)}


class Rotated(layers.MultiHeadAttention):
    """Rotary embeddings (Su et al. 2021), without angles: queries and keys are changed before they meet."""

    def _compute_attention(self, query, key, value, *args, **kwargs):
        turned = (ops.concatenate([-each[..., 2:], each[..., :2]], axis=-1) for each in (query, key))
        return super()._compute_attention(*turned, value, *args, **kwargs)


def rotated(tokens):
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    return x + Rotated(2, 4)(x, x, use_causal_mask=True)


def turned_by_position(x):
    """A rotary embedding of [batch, positions, heads, features], which counts the positions that it is given."""
    angles = ops.cast(ops.arange(ops.shape(x)[1]), x.dtype)[None, :, None, None] * 0.3
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return ops.concatenate(
        [first * ops.cos(angles) - second * ops.sin(angles), second * ops.cos(angles) + first * ops.sin(angles)], -1
    )


class OwnDecoder(layers.Layer):
    """As KerasHub's Llama: projections by EinsumDense, rotary embeddings, fewer keys than queries."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.query = layers.EinsumDense("btc,chd->bthd", (None, 4, 2), name="query")
        self.key = layers.EinsumDense("btc,chd->bthd", (None, 2, 2), name="key")
        self.value = layers.EinsumDense("btc,chd->bthd", (None, 2, 2), name="value")
        self.attend = hvdtrain.DotProductAttention(is_causal=True, rotate=turned_by_position)
        self.project = layers.EinsumDense("bthd,hdc->btc", (None, WIDTH), name="project")

    def call(self, x, padding_mask=None):
        y = self.attend(self.query(x), self.key(x), self.value(x), padding_mask)
        return x + self.project(y)


def own_decoder(tokens):
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    return OwnDecoder()(x)


def own_decoder_with_padding(tokens):
    embedding = layers.Embedding(WORDS, WIDTH, mask_zero=True)
    x = embedding(tokens)
    return OwnDecoder()(x, embedding.compute_mask(tokens))


CASES = {
    "attention of one's own": (own_decoder, TOKENS, {}),
    "attention of one's own with padding": (own_decoder_with_padding, PADDED, {}),
    "a model of Keras' pages": (gpt, TOKENS, {}),
    "a mask of padding": (masked, PADDED, {}),
    "grouped heads": (grouped, TOKENS, {}),
    "attention that changes queries and keys": (rotated, TOKENS, {}),
    "a tied table": (tied, PADDED, {}),
    "a mask of its own": (with_a_mask_of_its_own, TOKENS, {}),
    "rows": (rows, ROWS, PATCHES),
    "experts": (experts, TOKENS, {}),
}


def functional(build, x):
    with ONE_AT_A_TIME:  # they share Python's random numbers
        keras.utils.set_random_seed(5)
        inputs = keras.Input(x.shape[1:], dtype=x.dtype)
        return keras.Model(inputs, build(inputs))


def gradients_of(model, x, weights):
    with tf.GradientTape() as tape:
        y = model(tf.constant(x), training=True)
        total = tf.reduce_sum(y * weights)
    gradients = tape.gradient(total, [v.value for v in model.trainable_variables])
    return y.numpy(), [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]


@pytest.mark.parametrize(
    "name",
    mostly_extended(
        CASES,
        lambda name: name in ("a mask of padding", "experts"),
        why="the others change what attention is given, not how slices of it are exchanged",
    ),
)
def test_slices_give_outputs_and_gradients_of_the_whole(name):
    build, x, rules = CASES[name]
    whole = functional(build, x)
    weights = np.random.default_rng(3).standard_normal(whole(x).shape)
    y, gradients = gradients_of(whole, x, weights)
    meeting = Meeting(SIZE)

    def body(rank):
        compute_in("float64")
        model = functional(build, x)
        split_sequences(model, Replica(meeting, rank), rules)
        sliced = local_outputs(model, model, x, training=True)
        assert sliced.shape[1] == LENGTH // SIZE
        assert positions_of(sliced) == Positions(rank, SIZE)
        return gradients_of(model, x, weights)

    found = outcomes_on(SIZE, body)
    for outputs, _ in found:
        np.testing.assert_allclose(outputs, y, rtol=1e-11, atol=1e-11)
    for mine, expected in zip(zip(*(each for _, each in found), strict=True), gradients, strict=True):
        # Each rank's total is of all positions, and its gradients are of its own.
        np.testing.assert_allclose(sum(mine) / SIZE, expected, rtol=1e-10, atol=1e-10)
        assert not np.allclose(mine[0], mine[1]) or not np.any(expected)


def test_numbers_of_each_sample_beside_a_sequence_stay_whole():
    """They have a length, too, which the ranks divide."""
    columns = np.random.default_rng(2).integers(0, 9, (BATCH, 4)).astype("int32")

    def build():
        with ONE_AT_A_TIME:
            keras.utils.set_random_seed(5)
            inputs = [keras.Input((LENGTH,), dtype="int32"), keras.Input((4,), dtype="int32")]
            x = layers.Embedding(WORDS, WIDTH)(inputs[0])
            x = x + layers.MultiHeadAttention(2, 4)(x, x)
            of_sample = layers.Dense(WIDTH)(layers.Flatten()(layers.Embedding(9, 3)(inputs[1])))
            return keras.Model(inputs, layers.Dense(WORDS)(x + of_sample[:, None]))

    meeting = Meeting(SIZE)

    def body(rank):
        compute_in("float64")
        model = build()
        split_sequences(model, Replica(meeting, rank), {})
        return model([TOKENS, columns]).numpy()

    expected = build()([TOKENS, columns])
    for found in outcomes_on(SIZE, body):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


class Unused:
    """The exchange of one of two ranks, for what is refused before anything is exchanged."""

    size, index, sends, by_host = SIZE, 1, True, None

    def all_gather(self, tensor, *, name):
        return tf.concat([tensor, tensor], 0)

    def all_to_all(self, tensor, *, name):
        return tf.identity(tensor)


def split(build, rules=None, shape=(LENGTH,), dtype="int32", inputs=None):
    if isinstance(build, type):
        model = build()
        model(tf.zeros([1, *shape], dtype))
    else:
        given = keras.Input(shape, dtype=dtype)
        model = keras.Model(given, build(given))
    split_sequences(model, Unused(), rules or {}, inputs)
    return model


def embedded(function):
    return lambda tokens: function(layers.Embedding(WORDS, WIDTH, name="table")(tokens))


@keras.saving.register_keras_serializable("test_context_parallel")
class Its(layers.Layer):
    """A layer of a user's own that calls a function."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


def its(function):
    return embedded(lambda x: Its(function, name="own")(x))


def own_attention(x):
    return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x, (0, 2, 1)))), x)


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x))
        return x


@keras.saving.register_keras_serializable("test_context_parallel")
class OtherExperts(hvdtrain.MixtureOfExperts):
    def call(self, inputs, training=None):
        return super().call(inputs[:, ::-1], training)


class LastInInference(layers.Layer):
    """As nanoGPT gives logits."""

    def call(self, x, training=False):
        return x if training else x[:, -1:]


class Noise(layers.Layer):
    def __init__(self, draw, **kwargs):
        super().__init__(**kwargs)
        self.draw = draw

    def call(self, x, training=False):
        return x + 0.1 * self.draw(ops.shape(x), dtype=x.dtype) if training else x


class Droppath(layers.Layer):
    """Stochastic depth, and dropout by the same generator."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        if not training:
            return x
        x = x * ops.floor(0.9 + keras.random.uniform((ops.shape(x)[0], 1, 1), dtype=x.dtype, seed=self.seeds))
        return keras.random.dropout(x, 0.1, seed=self.seeds)


def both_lists(tokens):
    x = TokenAndPositionEmbedding(LENGTH, WORDS, WIDTH, name="both")
    return x(tokens) + ops.expand_dims(x.pos_emb(tokens[:, 0]), 1)


REFUSALS = {
    "heads": (
        embedded(lambda x: layers.MultiHeadAttention(3, 4, name="att")(x, x)),
        "cp=2 does not divide the heads of MultiHeadAttention 'att'.*Received: 3 heads",
    ),
    "dims": (
        embedded(lambda x: layers.MultiHeadAttention(2, 4, attention_axes=(1, 2))(x[:, None], x[:, None])),
        r"attends along the dims \(1, 2\)",
    ),
    "a convolution": (embedded(layers.Conv1D(4, 3, padding="same", name="conv")), "/conv.* looks at several positions"),
    "recurrence": (embedded(layers.LSTM(4, return_sequences=True, name="memory")), "/memory.* looks at several"),
    "pooling": (embedded(layers.GlobalAveragePooling1D(name="pool")), "/pool.* looks at several positions"),
    "a norm": (embedded(layers.LayerNormalization(axis=(1, 2), name="norm")), "/norm_1/Reshape"),
    "attention by hand": (its(own_attention), "/own.* looks at several positions"),
    "einsum": (its(lambda x: ops.einsum("bqd,bkd->bqk", x, x)), "/own.* looks at several positions"),
    "softmax": (embedded(layers.Softmax(axis=1, name="soft")), "/soft.* looks at several positions"),
    "the first position": (its(lambda x: x[:, 0]), "/own.* looks at several positions"),
    "a dense layer over positions": (
        its(lambda x: ops.transpose(layers.Dense(8, name="mix")(ops.transpose(x, (0, 2, 1))), (0, 2, 1))),
        "/own.*/mix.* looks at several positions",
    ),
    "an equation over positions": (
        embedded(layers.EinsumDense("abc,bd->adc", (8, WIDTH), name="mix")),
        "one meets a tensor of all positions.*/mix",
    ),
    "divided by the length": (its(lambda x: x / x.shape[1]), "/own.* computes with the length of the sequence"),
    "divided by the length as a tensor": (
        its(lambda x: x / tf.cast(tf.shape(x)[1], x.dtype)),
        "/own.* computes with the length of the sequence",
    ),
    "numbers of positions": (
        its(lambda x: x + tf.cast(tf.range(tf.shape(x)[1]), x.dtype)[:, None]),
        "/own.* computes with the length of the sequence",
    ),
    "a table of all positions": (
        embedded(lambda x: x + np.ones((LENGTH, WIDTH))),
        "one meets a tensor of all positions",
    ),
    "an output of samples": (
        lambda tokens: layers.Dense(2)(layers.Embedding(WORDS, WIDTH)(tokens[:, :1])),
        "each output must have one value for each position",
    ),
    "two outputs": (
        lambda tokens: [layers.Embedding(WORDS, 4)(tokens), tokens],
        "each output must have one value for each position",
    ),
    "a loss of a layer": (embedded(AddsLoss(name="adds")), "AddsLoss 'adds' adds a loss"),
    "a regularizer": (
        embedded(layers.Dense(4, activity_regularizer="l2", name="regular")),
        "activity regularizer of Dense 'regular'",
    ),
    "experts with a call of their own": (
        embedded(lambda x: OtherExperts(experts=2, hidden=8, name="moe")(x)),
        "OtherExperts 'moe' counts the tokens",
    ),
    "divided tables": (
        embedded(lambda x: hvdtrain.ShardedEmbedding(5, 4, "row", name="rows")(ops.argmax(x, -1))),
        "ShardedEmbedding 'rows' counts the tokens",
    ),
    "experts of whole sequences": (
        lambda tokens: hvdtrain.MixtureOfExperts(2, 8, name="moe")(ops.one_hot(tokens, 4)),
        "MixtureOfExperts 'moe' is given whole sequences",
    ),
    "the last position in inference": (
        embedded(lambda x: LastInInference(name="last")(x)),
        "/last.* looks at several positions",
    ),
    "noise of TensorFlow's own": (
        embedded(lambda x: Noise(tf.random.normal, name="noise")(x)),
        "/noise.* draws at random for slices.*keras.random.SeedGenerator",
    ),
    "noise of Keras' global generator": (
        embedded(lambda x: Noise(keras.random.normal, name="noise")(x)),
        "/noise.* draws at random for slices.*keras.random.SeedGenerator",
    ),
    "one dropout for slices and samples": (
        embedded(lambda x: Droppath(name="path")(layers.Dense(WIDTH)(x))),
        "random generator .* is used for shards of activations.* Use a layer",
    ),
    "lists of positions and of samples": (
        both_lists,
        "Embedding 'both/.*' looks up positions, and a number of each sample",
    ),
    "scores": (
        embedded(lambda x: layers.MultiHeadAttention(2, 4)(x, x, return_attention_scores=True)[0]),
        "none has the scores of all",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_looks_at_other_positions_is_refused_with_its_name(name):
    build, words = REFUSALS[name]
    with pytest.raises(ConfigError) as caught:
        split(build)
    assert re.search(words, str(caught.value), re.S), str(caught.value)


class RandomUse(layers.Layer):
    """Brightness of each sample, as of keras.layers.RandomBrightness."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x):
        return x * keras.random.uniform((ops.shape(x)[0], 1, 1), dtype=x.dtype, seed=self.seed_generator)


def test_what_is_drawn_for_whole_samples_is_the_same_on_the_ranks_that_share_them():
    def build(x):
        x = layers.GaussianNoise(0.1, name="before")(x)
        x = layers.Dense(WIDTH, name="patches")(RandomUse(name="brightness")(x))
        x = layers.SpatialDropout1D(0.5, name="of_features")(x)
        x = layers.Dropout(0.5, noise_shape=(None, None, 1), name="of_positions")(x)
        return layers.Dropout(0.1, name="of_all")(x)

    model = split(build, PATCHES, shape=(LENGTH, 5), dtype="float64")
    names = ("before", "brightness", "of_features", "of_positions", "of_all")
    shared = {name: drawn_for_samples(model.get_layer(name).seed_generator.state) for name in names}
    assert shared == dict.fromkeys(names[:3], True) | dict.fromkeys(names[3:], False)


def test_a_batch_may_have_as_many_samples_as_a_sequence_has_positions():
    """Of which each has a class, looked up as positions are."""

    def build():
        with ONE_AT_A_TIME:
            keras.utils.set_random_seed(5)
            tokens, kind = keras.Input((LENGTH,), dtype="int32"), keras.Input((), dtype="int32")
            x = TokenAndPositionEmbedding(LENGTH, WORDS, WIDTH)(tokens)
            x = x + layers.Reshape((1, WIDTH))(layers.Embedding(5, WIDTH, name="kind")(kind))
            return keras.Model([tokens, kind], layers.Dense(WORDS)(x))

    tokens = np.random.default_rng(0).integers(1, WORDS, (LENGTH, LENGTH)).astype("int32")
    inputs = [tf.constant(tokens), tf.range(LENGTH) % 5]
    meeting = Meeting(SIZE)

    def body(rank):
        compute_in("float64")
        model = build()
        split_sequences(model, Replica(meeting, rank), {})
        return model(inputs).numpy()

    for outputs in outcomes_on(SIZE, body):
        np.testing.assert_allclose(outputs, build()(inputs), rtol=1e-11, atol=1e-11)


class Sequences(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(WORDS, WIDTH)

    def call(self, x):
        return self.table(x)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"build": gpt, "shape": (7,)}, "cp=2 does not divide the length of the sequences.* Received: 7 positions"),
        ({"build": embedded(lambda x: x), "shape": (None,)}, r"takes any: give keras.Input the length.*inputs=x\[:1\]"),
        ({"build": embedded(lambda x: x), "shape": ()}, r"has none\. Leave cp out"),
        ({"build": Sequences}, r"does not tell what it is called with.*inputs=x\[:1\]"),
        (
            {"build": rows, "shape": ROWS.shape[1:], "dtype": "float64"},
            r'is given whole sequences.*\{"LAYER/output": \(None, "cp", None\)\}',
        ),
        (
            {"build": rows, "rules": {"head/output": (None, "cp", None)}, "shape": ROWS.shape[1:], "dtype": "float64"},
            "The rule 'head/output' matches no layer of the model, which has",
        ),
    ],
    ids=["length", "any length", "no sequence", "own class", "no rule", "unknown rule"],
)
def test_what_cannot_be_cut_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        split(**options)


@pytest.mark.parametrize("layout", [("cp", None, None), (None, None, "cp"), (None, "cp", "tp")])
def test_rules_along_cp_are_about_positions(layout):
    with pytest.raises(ConfigError, match="Along cp the output of a layer is cut"):
        separated({"patches/output": layout})
    with pytest.raises(ConfigError, match="Along cp the output"):
        separated({"patches/kernel": (None, "cp")})
    assert separated({**PATCHES, "kernel": (None, "tp")}) == ({"kernel": (None, "tp")}, PATCHES)


def test_targets_and_weights_are_those_of_the_positions():
    outputs = with_positions(tf.zeros([2, 6, 5]), Positions(2, 3))
    targets, weights = tf.reshape(tf.range(12), [2, 6]), tf.reshape(tf.range(12.0), [2, 6])
    mine, own = belonging(outputs, targets, weights)
    assert mine.numpy().tolist() == own.numpy().tolist() == [[4, 5], [10, 11]]
    of_samples = tf.constant([[1.0], [2.0]])
    assert belonging(outputs, targets, of_samples)[1] is of_samples
    assert belonging(tf.zeros([2, 6, 5]), targets, weights)[0] is targets
    for wrong in (tf.zeros([2]), tf.zeros([2, 5])):
        with pytest.raises(ConfigError, match=r"cp=3 cuts targets along the sequence, \[batch, 6, …\]"):
            belonging(outputs, wrong, None)


def test_lengths_that_are_known_late_must_divide_too():
    cut = tf.function(lambda x: Positions(1, 2).of(x), input_signature=[tf.TensorSpec([None, None])])
    assert cut(tf.reshape(tf.range(4.0), [1, 4])).numpy().tolist() == [[2, 3]]
    with pytest.raises(tf.errors.InvalidArgumentError, match="cp must divide the positions"):
        cut(tf.zeros([1, 5]))
    with pytest.raises(ConfigError, match="cp=2 does not divide the 5 positions of the sequence"):
        Positions(1, 2).of(tf.zeros([1, 5]))


def whole_sequences_that_match(targets, outputs):
    right = tf.equal(tf.cast(targets, tf.int64), tf.argmax(outputs, -1))
    return tf.cast(tf.reduce_all(right, -1), tf.float32)


def largest(targets, outputs):
    values = tf.keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
    return tf.reduce_max(values, -1)


class SequencesRight(keras.metrics.Metric):
    def __init__(self, name="right", **kwargs):
        super().__init__(name=name, **kwargs)
        self.right, self.seen = (self.add_weight(name=part, initializer="zeros") for part in ("right", "seen"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.right.assign_add(tf.reduce_sum(whole_sequences_that_match(y_true, y_pred)))
        self.seen.assign_add(tf.cast(tf.shape(y_pred)[0], "float32"))

    def result(self):
        return self.right / self.seen


def close(targets, outputs):
    return keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True) < 1


CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize(
    ("loss", "metrics", "refused"),
    [
        (CROSS_ENTROPY, ["accuracy", close, keras.metrics.SparseTopKCategoricalAccuracy(2)], None),
        (CROSS_ENTROPY, [whole_sequences_that_match], "metric 'whole_sequences_that_match' looks at several"),
        (CROSS_ENTROPY, [SequencesRight], "metric 'right' looks at several positions"),
        (largest, [], "The loss looks at several positions"),
    ],
    ids=["fit", "function", "class", "loss"],
)
def test_loss_and_metrics_must_look_at_each_position_by_itself(loss, metrics, refused):
    compute_in("float32")
    rng = np.random.default_rng(2)
    targets = tf.constant(rng.integers(0, 5, (4, 6)))
    outputs = tf.constant(rng.standard_normal((4, 6, 5)).astype("float32"))
    metrics = [metric() if isinstance(metric, type) else metric for metric in metrics]
    tokens = keras.Input((6, 5))
    model = keras.Model(tokens, keras.layers.Activation("linear")(tokens))
    model.compile("sgd", loss, metrics=metrics)
    build_from(model, (outputs, targets))
    PositionSlices(NoOpCollectives(), nullcontext).install(model)

    def check():
        check_positions(model, NoOpCollectives(), targets, outputs, 3)

    if refused is None:
        check()
    else:
        with pytest.raises(ConfigError, match=refused):
            check()
