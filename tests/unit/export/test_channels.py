"""Channels that are zero are taken out of models of the field's shapes, which then compute the same."""

import keras
import numpy as np
import pytest
from keras import layers

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.export.channels import chains_of
from tests.extended import mostly_extended


def plain():
    images = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="relu", name="first")(images)
    x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(12, 3, activation="gelu", name="second")(x)
    x = layers.Flatten()(x)
    x = layers.Dropout(0.2)(layers.Dense(16, "tanh", name="hidden")(x))
    return keras.Model(images, layers.Dense(3, name="last")(x))


def normalized():
    images = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, use_bias=False, name="first")(images)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Conv2D(12, 3, name="second")(layers.ZeroPadding2D()(x))
    x = layers.Flatten()(layers.Activation("swish")(x))
    x = layers.BatchNormalization()(x)
    return keras.Model(images, layers.Dense(3, name="last")(x))


def residual():
    """As in a ResNet: the channels of the sum stay, those within a block go."""
    images = keras.Input((8, 8, 3))
    stem = layers.Conv2D(8, 3, padding="same", activation="relu", name="stem")(images)
    x = layers.Conv2D(6, 3, padding="same", use_bias=False, name="inner")(stem)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", name="outer")(x))
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(layers.Add()([x, stem])))
    return keras.Model(images, layers.Dense(3, name="last")(x))


def block():
    """The hidden layer of a transformer's block goes, and what the residual path or a norm of features reads stays."""
    tokens = keras.Input((5, 8))
    x = layers.LayerNormalization()(tokens)
    x = layers.Add()([tokens, layers.MultiHeadAttention(2, 4)(x, x)])
    hidden = layers.Dense(32, "gelu", name="up")(layers.LayerNormalization()(x))
    x = layers.Add()([x, layers.Dense(8, name="down")(layers.Dropout(0.1)(hidden))])
    return keras.Model(tokens, layers.Dense(3, name="last")(x))


def branches():
    signal = keras.Input((12, 4))
    x = layers.Conv1D(8, 3, activation="relu", name="shared")(signal)
    one = layers.GlobalMaxPooling1D()(x)
    two = layers.Flatten()(layers.Conv1D(4, 3, activation="relu", name="inner")(x))
    return keras.Model(signal, [layers.Dense(2, name="a")(one), layers.Dense(3, name="b")(two)])


def stacked():
    return keras.Sequential(
        [
            keras.Input((10,)),
            layers.Dense(16, "relu", name="one"),
            layers.Dense(12, "relu", name="two"),
            layers.Dense(2),
        ]
    )


CASES = {
    plain: {"first", "second", "hidden"},
    normalized: {"first", "second"},
    residual: {"inner"},
    block: {"up"},
    branches: {"shared", "inner"},
    stacked: {"one", "two"},
}


@pytest.mark.parametrize(
    "build",
    mostly_extended(
        CASES,
        lambda build: build in (normalized, residual),
        why="statistics, a sum and what is left alone between them",
    ),
    ids=lambda build: build.__name__,
)
def test_pruned_channels_are_taken_out_of_what_computes_the_same(build):
    keras.utils.set_random_seed(0)
    model = build()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, *model.input_shape[1:])).astype("float32")
    outputs = model.predict(x, verbose=0)
    y = keras.tree.map_structure(lambda each: rng.standard_normal(each.shape).astype("float32"), outputs)
    pruned = hvdtrain.prune(model, 0.5, pattern="channels")
    assert {path.rpartition("/")[2] for path in pruned} == CASES[build]
    model.compile(keras.optimizers.Adam(0.01), ["mse"] * len(model.outputs) if len(model.outputs) > 1 else "mse")
    model.fit(x, y, epochs=4, batch_size=4, verbose=0)
    hvdtrain.finish_pruning(model)
    smaller = hvdtrain.take_out_channels(model)
    for layer in CASES[build]:
        assert 2 * smaller.get_layer(layer).kernel.shape[-1] == model.get_layer(layer).kernel.shape[-1]
    assert smaller.count_params() < 0.85 * model.count_params()
    keras.tree.map_structure(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5),
        smaller.predict(x, verbose=0),
        model.predict(x, verbose=0),
    )
    smaller.compile("adam", model.loss)
    smaller.fit(x, y, verbose=0)  # it is trained further


def last_softmax():
    x = keras.Input((8,))
    return keras.Model(x, layers.Dense(3)(layers.Dense(6, "softmax", name="one")(x)))


def read_by_the_user():
    x = keras.Input((8,))
    hidden = layers.Dense(6, "relu", name="one")(x)
    return keras.Model(x, [hidden, layers.Dense(3)(hidden)])


def moved_by_a_constant():
    x = keras.Input((8,))
    return keras.Model(x, layers.Dense(3)(layers.Dense(6, "relu", name="one")(x) + 1.0))


def called_twice():
    x, shared = keras.Input((8,)), layers.Dense(8, "relu", name="one")
    return keras.Model(x, layers.Dense(3)(shared(shared(x))))


def moved_by_a_mean():
    x = keras.Input((8,))
    return keras.Model(x, layers.Dense(3)(layers.BatchNormalization(scale=False)(layers.Dense(6, name="one")(x))))


def read_by_another_call():
    x = keras.Input((8,))
    shared = layers.Activation("sigmoid")
    first, hidden = shared(x), layers.Dense(6, "relu", name="one")(x)
    return keras.Model(x, [layers.Dense(3)(hidden), keras.ops.sum(shared(hidden), -1), first])


def read_by_a_shared_layer():
    x, reader = keras.Input((8,)), layers.Dense(3)
    hidden = layers.Dense(6, "relu", name="one")(x)
    return keras.Model(x, reader(hidden) + reader(layers.Dense(6, name="other")(x)))


def normalized_by_a_shared_layer():
    x, norm = keras.Input((8,)), layers.BatchNormalization()
    hidden, other = norm(layers.Dense(6, name="one")(x)), norm(layers.Dense(6, name="other")(x))
    return keras.Model(x, [layers.Dense(3)(hidden), other])


def normalized_by_a_frozen_layer():
    x, norm = keras.Input((8,)), layers.BatchNormalization(trainable=False)
    return keras.Model(x, layers.Dense(3)(norm(layers.Dense(6, name="one")(x))))


def moved_by_a_threshold():
    x = keras.Input((8,))
    hidden = layers.ReLU(negative_slope=0.1, threshold=1.0)(layers.Dense(6, name="one")(x))
    return keras.Model(x, layers.Dense(3)(hidden))


@keras.saving.register_keras_serializable("tests")
def mixing(values):
    return values * keras.ops.mean(values, -1, keepdims=True)


def mixed_by_its_activation():
    x = keras.Input((8,))
    hidden = layers.Dense(6, mixing, name="one")(x)
    return keras.Model(x, layers.Dense(3)(hidden))


def read_by_channels_first():
    x = keras.Input((8, 8, 4))
    return keras.Model(x, layers.Conv2D(3, 3, data_format="channels_first")(layers.Dense(6, name="one")(x)))


def in_groups():
    x = keras.Input((8, 8, 4))
    hidden = layers.Conv2D(4, 3, name="one")(x)
    return keras.Model(x, layers.Conv2D(4, 3, groups=2)(hidden))


def channels_by_depth():
    x = keras.Input((8, 8, 4))
    return keras.Model(x, layers.Conv2D(3, 3)(layers.DepthwiseConv2D(3)(layers.Conv2D(4, 3, name="one")(x))))


def within_another():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
    x = keras.Input((8,))
    return keras.Model(x, inner(layers.Dense(6, "relu", name="one")(x)))


OTHERS = [
    moved_by_a_mean,
    last_softmax,
    read_by_the_user,
    moved_by_a_constant,
    called_twice,
    in_groups,
    channels_by_depth,
    within_another,
    read_by_another_call,
    read_by_a_shared_layer,
    normalized_by_a_shared_layer,
    normalized_by_a_frozen_layer,
    moved_by_a_threshold,
    mixed_by_its_activation,
    read_by_channels_first,
]


@pytest.mark.parametrize("build", OTHERS)
def test_channels_that_something_else_reads_stay(build):
    model = build()
    layer = model.get_layer("one")
    assert id(layer) not in chains_of(model)
    with pytest.raises(
        ConfigError, match=r"whose channels are read by others of these alone, whose path has '\^one\$'"
    ):
        hvdtrain.prune(model, 0.5, pattern="channels", layers="^one$")
    layer.kernel.assign(keras.ops.zeros_like(layer.kernel))
    layer.bias.assign(keras.ops.zeros_like(layer.bias))
    copy = hvdtrain.take_out_channels(model)
    assert copy.get_layer("one").kernel.shape == layer.kernel.shape


def test_one_channel_stays_and_a_norm_that_moves_zeros_keeps_them():
    model = stacked()
    for weight in model.get_layer("one").weights:
        weight.assign(keras.ops.zeros_like(weight))
    assert hvdtrain.take_out_channels(model).get_layer("one").units == 1
    model = normalized()
    first = model.get_layer("first")
    first.kernel.assign(keras.ops.zeros_like(first.kernel))
    model.layers[2].beta.assign(np.arange(8.0))  # takes seven channels of zeros to others
    copy = hvdtrain.take_out_channels(model)
    assert copy.get_layer("first").filters == 7
    x = np.random.default_rng(0).random((2, 8, 8, 3), "float32")
    np.testing.assert_allclose(copy.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)


def test_what_layers_have_adapted_to_goes_with_them():
    norm = layers.Normalization()
    x = np.random.default_rng(0).normal(5, 3, (32, 8)).astype("float32")
    norm.adapt(x)
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(3)(layers.Dense(6, "relu", name="one")(norm(inputs))))
    one = model.get_layer("one")
    one.kernel.assign(np.asarray(one.kernel) * (np.arange(6) % 2))
    copy = hvdtrain.take_out_channels(model)
    assert copy.get_layer("one").units == 3
    np.testing.assert_allclose(copy.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5)


def test_a_model_that_keras_cannot_copy_is_refused():
    inputs = keras.Input((8,))
    x = layers.Lambda(lambda values: 2 * values)(inputs)
    model = keras.Model(inputs, layers.Dense(3)(layers.Dense(6, "relu")(x)))
    with pytest.raises(ConfigError, match="Channels are taken out of a copy of a model, which Keras cannot make"):
        hvdtrain.take_out_channels(model)
    assert not model.compiled


def test_models_of_a_class_of_their_own_are_refused():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):
            return self.dense(x)

    model = Own()
    model(np.ones((1, 4)))
    with pytest.raises(ConfigError, match="take_out_channels takes functional and Sequential models"):
        hvdtrain.take_out_channels(model)
    with pytest.raises(ConfigError, match="whose channels are read by others of these alone"):
        hvdtrain.prune(model, 0.5, pattern="channels")
