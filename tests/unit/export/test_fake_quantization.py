"""Models that are trained as they will be with fewer bits compute what Keras' quantized ones compute."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.export.fake_quantization import summed_inputs
from tests.extended import mostly_extended

X = np.random.default_rng(0).standard_normal((8, 300)).astype("float32")


def predicted(model, x=X):
    return model.predict(x, verbose=0)


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.Dense(9, "relu"),
        lambda: layers.EinsumDense("ab,bcd->acd", (4, 5), bias_axes="d"),
    ],
    ids=["Dense", "EinsumDense"],
)
def test_a_layer_computes_what_keras_quantized_one_does(layer, mode):
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((300,)), layer()])
    plain = predicted(net)
    hvdtrain.fake_quantize(net, mode)
    rounded = predicted(net)
    hvdtrain.finish_fake_quantize(net)
    np.testing.assert_array_equal(predicted(net), plain)
    net.quantize(mode)
    np.testing.assert_allclose(rounded, predicted(net), atol=5e-6)
    assert np.abs(rounded - plain).max() > 0.01


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
@pytest.mark.parametrize(
    "mode", mostly_extended(["int8", "int4"], lambda mode: mode == "int4", why="8 bits lose next to nothing")
)
def test_a_trained_model_is_better_for_it(mode):
    def build():
        keras.utils.set_random_seed(0)
        tokens = keras.Input((6, 160))
        x = layers.MultiHeadAttention(2, 8)(tokens, tokens)
        x = layers.Dense(64, "relu")(layers.Flatten()(x))
        model = keras.Model(tokens, layers.Dense(1)(x))
        model.compile(keras.optimizers.Adam(3e-3), "mse")
        return model

    x = np.random.default_rng(1).standard_normal((64, 6, 160)).astype("float32")
    y = x[:, 0, :1] * x[:, 1, 1:2]
    losses = {}
    for aware in (False, True):
        model = build()
        model.fit(x, y, epochs=30, verbose=0)
        if aware:
            assert len(hvdtrain.fake_quantize(model, mode)) == 6
        model.fit(x, y, epochs=20, verbose=0, shuffle=False)
        trained = model.evaluate(x, y, verbose=0)
        hvdtrain.finish_fake_quantize(model)
        model.quantize(mode)
        losses[aware] = model.evaluate(x, y, verbose=0)
    assert losses[True] == pytest.approx(trained, rel=0.05)
    if mode == "int4":  # 8 bits lose next to nothing
        assert losses[True] < 0.8 * losses[False]


def test_inputs_are_rounded_over_what_is_summed():
    for equation, dims in (("...x,xy->...y", [-1]), ("abcd,cde->abe", [-2, -1]), ("abc,bd->adc", [-2])):
        assert summed_inputs(layers.EinsumDense(equation, (None,))) == dims


def test_gradients_pass_as_if_nothing_had_been_rounded():
    net = keras.Sequential([keras.Input((300,)), layers.Dense(4)])
    hvdtrain.fake_quantize(net)
    kernel = net.layers[0].kernel
    with tf.GradientTape() as tape:
        tape.watch(inputs := tf.constant(X))
        loss = tf.reduce_sum(net(inputs))
    by_kernel, by_inputs = tape.gradient(loss, [kernel.value, inputs])
    scale = 127 / np.abs(X).max(axis=1, keepdims=True)
    rounded = np.round(X * scale) / scale
    np.testing.assert_allclose(by_kernel, np.repeat(rounded.sum(0)[:, None], 4, axis=1), rtol=1e-4, atol=1e-4)
    kernel_scale = 127 / np.abs(kernel).max(axis=0)
    np.testing.assert_allclose(
        by_inputs[0], (np.round(kernel * kernel_scale) / kernel_scale).sum(1), rtol=1e-4, atol=1e-4
    )


def test_integers_small_numbers_and_mistakes_are_as_without_rounding():
    keras.utils.set_random_seed(0)
    for dtype, x in (("int32", np.arange(16).reshape(2, 8)), ("float32", np.full((2, 8), 1e-3, "float32"))):
        net = keras.Sequential([keras.Input((8,), dtype=dtype), layers.Dense(4, dtype="mixed_float16")])
        plain = predicted(net, x)
        hvdtrain.fake_quantize(net)
        np.testing.assert_allclose(predicted(net, x), plain, rtol=0.1, atol=0.02 * np.abs(plain).max())
    layer = layers.Dense(4)
    sparse = keras.Sequential([keras.Input((8,), sparse=True), layer])
    hvdtrain.fake_quantize(sparse)
    with pytest.raises(ValueError, match="Exception encountered"):
        sparse(tf.sparse.from_dense(np.eye(8, dtype="float32")))
    assert isinstance(layer.kernel, keras.Variable)


@pytest.mark.usefixtures("session")
def test_what_would_lose_or_keep_the_rounding_is_refused(tmp_path):
    net = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="one"), layers.BatchNormalization()])
    hvdtrain.fake_quantize(net)
    with pytest.raises(ConfigError, match=r"makes a copy of the model, in which '.*one' is not rounded"):
        hvdtrain.Trainer(net, "sgd", "mse", sync_batch_norm=True)
    with pytest.raises(ConfigError, match=r"gives no adapter to the layer '.*one', which is rounded"):
        hvdtrain.lora(net, layers="one")
    with pytest.raises(ConfigError, match=r"call hvdtrain.finish_fake_quantize\(model\) before"):
        hvdtrain.Trainer(net).export(tmp_path / "m.keras", format="keras")


def test_of_a_convolution_the_kernel_is_rounded_by_output():
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((6, 6, 3)), layers.Conv2D(5, 3, name="conv")])
    kernel = net.layers[0].kernel.numpy()
    with pytest.raises(ConfigError, match="finds no Dense, EinsumDense or convolution"):
        hvdtrain.fake_quantize(net, "int4")
    hvdtrain.fake_quantize(net)
    x = np.random.default_rng(0).random((2, 6, 6, 3), "float32")
    found = predicted(net, x)
    np.testing.assert_array_equal(net.layers[0].kernel, kernel)
    scale = 127 / np.abs(kernel).max(axis=(0, 1, 2))
    hvdtrain.finish_fake_quantize(net)
    net.layers[0].kernel.assign(np.round(kernel * scale) / scale)
    np.testing.assert_allclose(found, predicted(net, x), atol=1e-5)


def test_what_cannot_be_rounded_is_refused():
    net = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="one"), layers.Dense(4, name="two")])
    for options, problem in (
        ({"mode": "int2"}, "fake_quantize takes int8 or int4. Received: 'int2'."),
        ({"layers": "three"}, "finds no Dense, EinsumDense or convolution whose path has 'three'"),
    ):
        with pytest.raises(ConfigError, match=problem):
            hvdtrain.fake_quantize(net, **options)
    with pytest.raises(ConfigError, match="Is the model built"):
        hvdtrain.fake_quantize(keras.Sequential([layers.Dense(3)]))
    hvdtrain.lora(net, 2, layers="one")
    with pytest.raises(ConfigError, match=r"The layer 'sequential.*one' has an adapter already"):
        hvdtrain.fake_quantize(net)
    assert hvdtrain.fake_quantize(net, layers="two") == [net.layers[1].path]
    with pytest.raises(ConfigError, match=r"The layer 'sequential.*two' is rounded already"):
        hvdtrain.fake_quantize(net, layers="two")
