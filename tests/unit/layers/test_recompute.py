"""Recomputed models compute what they computed before, and keep less of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from hvdtrain.config.errors import ConfigError
from hvdtrain.layers.recompute import Recompute, _segments, recomputed_model
from hvdtrain.models.resnet import build as resnet
from hvdtrain.models.transformer import build as transformer
from hvdtrain.optim.precision import precision
from tests.extended import mostly_extended

X = np.random.default_rng(0).random((6, 8), dtype="float32")
IMAGES = np.random.default_rng(1).random((2, 8, 8, 3))
TOKENS = np.array([[3, 1, 0, 0], [2, 2, 5, 0]])


def chain(length=6):
    """Layers of every kind that does not compute the same when it is called again."""
    stack = []
    for number in range(length):
        stack += [layers.Dense(8, activation="tanh"), layers.BatchNormalization(), layers.Dropout(0.3, seed=number)]
    return keras.Sequential([keras.Input((8,)), *stack, layers.Dense(1)])


def shared():
    """A layer that is used twice, a nested model that is used three times, and two outputs."""
    inputs = keras.Input((8,))
    twice = layers.Dense(8, activation="tanh", name="twice")
    x = twice(twice(inputs))
    block_input = keras.Input((8,))
    block = keras.Model(block_input, layers.Add()([block_input, layers.Dense(8)(layers.Dropout(0.5)(block_input))]))
    for _ in range(3):
        x = layers.Dense(8, activation="gelu")(block(x))
    return keras.Model(inputs, {"one": layers.Dense(3)(x), "other": layers.Dense(2)(x)})


def half():
    return keras.Sequential([keras.Input((8,)), *(layers.Dense(8, activation="gelu") for _ in range(9))])


# Each with its inputs, its precision, and how far roundings may take two graphs apart: what is fused into one kernel,
# and rounded once, is not the same in both.
MODELS = {
    "chain": (chain, X, "float64", 1e-9),
    "shared": (shared, X, "float64", 1e-9),
    "half": (half, X, "mixed_bfloat16", 8 * 2**-8),
    "resnet": (lambda: resnet((8, 8, 3), 4, 0, depth=14, width=4), IMAGES, "float32", 1e-5),
    "transformer": (lambda: transformer((4,), 9, 0, depth=3, width=8, heads=2, dropout=0.2), TOKENS, "float32", 1e-5),
}


def two_steps(model, forward, inputs, compiled):
    """Loss and gradients of the second of two steps, and what became of statistics and generators."""

    def step(inputs):
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(forward(inputs, training=True))
            loss = tf.add_n([tf.reduce_mean(output**2) for output in outputs])
        return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])

    run = tf.function(step, autograph=False) if compiled else step
    run(tf.constant(inputs))
    loss, gradients = run(tf.constant(inputs))
    state = [v.numpy() for v in model.non_trainable_variables]
    return [np.array(value, "float64") for value in (loss, *map(tf.convert_to_tensor, gradients), *state)]


@pytest.mark.parametrize(
    ("name", "compiled"),
    mostly_extended(
        [(name, compiled) for name in MODELS for compiled in (False, True)],
        lambda name, compiled: name == "chain" and compiled,
        why="a compiled one draws and keeps statistics, too; other kinds of layers and cuts are in launches",
    ),
)
def test_values_gradients_statistics_and_draws_are_those_of_the_model(name, compiled):
    build, inputs, precise, tolerance = MODELS[name]
    results = []
    for wrap in (lambda model: model, recomputed_model):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        with precision(precise):
            model = build()
        results.append(two_steps(model, wrap(model), inputs, compiled))
    for plain, again in zip(*results, strict=True):
        assert np.abs(again - plain).max() <= tolerance * max(np.abs(plain).max(), 1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_cut_into_about_root_n_segments(name):
    model = MODELS[name][0]()
    count = len(keras.Function(model.inputs, model.outputs).operations)
    assert 2 <= len(_segments(model)) <= np.sqrt(count) + 1


def test_the_forward_pass_runs_again_in_the_backward_pass():
    runs = []

    class Counted(layers.Layer):
        def call(self, x):
            runs.append(self.name)
            return 2.0 * x

    model = keras.Sequential([keras.Input((8,)), *(Counted(name=f"layer{i}") for i in range(9))])
    forward, x = recomputed_model(model), tf.Variable(X)
    runs.clear()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(forward(x, training=True))
    assert runs == [f"layer{i}" for i in range(9)]
    runs.clear()
    assert float(tape.gradient(loss, x)[0, 0]) == 2.0**9
    # Three segments, the last of which had kept what it needs.
    assert runs == [f"layer{i}" for i in (3, 4, 5, 6, 0, 1, 2)]


@pytest.mark.extended
def test_a_block_of_a_users_own_model():
    class Own(keras.Model):
        def __init__(self, wrap):
            super().__init__()
            self.blocks = [wrap(chain(2)) for _ in range(2)]
            self.top = layers.Dense(3)

        def call(self, x):
            for block in self.blocks:
                x = x + block(x)
            return self.top(x)

    results = []
    for wrap in (lambda block: block, Recompute):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = Own(wrap)
        model(X)
        results.append(two_steps(model, model, X, compiled=True))
    assert len(results[0]) == len(results[1])
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-6)
    assert sorted(float(np.abs(g).sum()) for g in results[1]) == pytest.approx(
        sorted(float(np.abs(g).sum()) for g in results[0]), rel=1e-5
    )


@pytest.mark.extended
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_masks_go_in_and_come_out(compiled):
    class Tagger(keras.Model):
        def __init__(self, wrap):
            super().__init__()
            self.embedding = layers.Embedding(7, 8, mask_zero=True)
            self.block = wrap(layers.LSTM(8, return_sequences=True))
            self.top = layers.LSTM(2)

        def call(self, x):
            return self.top(self.block(self.embedding(x)))

    results = []
    for wrap in (lambda block: block, Recompute):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = Tagger(wrap)
        model(TOKENS)
        results.append(two_steps(model, model, TOKENS, compiled))
        np.testing.assert_array_equal(model(TOKENS)[0], model(TOKENS[:1])[0])
        changed = TOKENS + 6 * (TOKENS == 0)
        assert np.abs(model(changed) - model(TOKENS)).max() > 1e-4, "the mask had no effect"
    for plain, again in zip(*results, strict=True):
        np.testing.assert_allclose(again, plain, rtol=1e-5, atol=1e-7)


def test_it_is_saved_and_loaded(tmp_path):
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(2)(Recompute(chain(), name="again")(inputs)))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(X), model(X))
    assert isinstance(loaded.layers[1], Recompute)


class Own(layers.Layer):
    """Adds two losses in a call, which is itself a block of layers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8, activation="tanh", activity_regularizer=keras.regularizers.L2(0.1))

    def call(self, x):
        y = self.dense(x)
        self.add_loss(0.01 * tf.reduce_mean(tf.abs(y)))
        self.add_loss(0.02 * tf.reduce_mean(y**2))
        return x + y


@pytest.mark.extended
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_losses_that_layers_add_count_once_with_their_gradients(compiled):
    results = []
    for wrap in (lambda model: model, recomputed_model):
        keras.utils.set_random_seed(0)
        with precision("float64"):
            dense = layers.Dense(8, activity_regularizer="l2")
            stack = [layer for _ in range(4) for layer in (Own(), layers.Dense(8))]
            model = keras.Sequential([keras.Input((8,)), dense, *stack, dense])
        forward = wrap(model)

        def step(inputs, model=model, forward=forward):
            with tf.GradientTape() as tape:
                outputs = forward(inputs, training=True)
                added = list(model.losses)
                loss = tf.reduce_mean(outputs**2) + tf.add_n(added)
            gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
            left = len(model.losses) - len(added)
            model._clear_losses()
            return loss, tf.stack(sorted(added)) if not compiled else tf.sort(tf.stack(added)), left, gradients

        run = tf.function(step, autograph=False) if compiled else step
        results.append(run(tf.constant(X, tf.float64)))
    (loss, added, left, gradients), (again, as_often, none_left, recomputed) = results
    assert len(added) == len(as_often) == 4 * 3 + 2
    assert int(left) == int(none_left) == 0
    np.testing.assert_allclose(as_often, added, rtol=1e-12)
    np.testing.assert_allclose(again, loss, rtol=1e-12)
    for mine, wanted in zip(recomputed, gradients, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-9, atol=1e-12)


def test_what_cannot_be_cut_is_refused():
    class Own(keras.Model):
        def call(self, x):
            return x

    with pytest.raises(ConfigError, match=r"Received: Own 'own'. Wrap its blocks in hvdtrain\.Recompute"):
        recomputed_model(Own(name="own"))
    inputs = keras.Input((8,))
    a, b = layers.Dense(8)(inputs), layers.Dense(8)(inputs)
    for _ in range(5):
        a, b = layers.Dense(8)(a), layers.Dense(8)(b)
    with pytest.raises(ConfigError, match="saves nothing on Functional 'two'"):
        recomputed_model(keras.Model(inputs, [a, b], name="two"))
