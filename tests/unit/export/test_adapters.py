"""Adapters: what is trained, what is frozen, and that a merged model computes the same."""

import keras
import numpy as np
import pytest
from keras import layers

import hvdtrain
from hvdtrain.config.errors import CheckpointError, ConfigError
from tests.extended import mostly_extended


def model(units=16):
    keras.utils.set_random_seed(0)
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, units, name="table")(tokens)
    x = x + layers.MultiHeadAttention(2, 8, name="attention")(x, x)
    return keras.Model(tokens, layers.Dense(3, name="last")(layers.GlobalAveragePooling1D()(x)))


def trained(net):
    draws = np.random.default_rng(0)
    x, y = draws.integers(0, 20, (32, 6)), draws.integers(0, 3, 32)
    net.compile(keras.optimizers.Adam(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    net.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    return x


@pytest.mark.parametrize(
    ("named", "count"),
    mostly_extended(
        [("query|value", 4), ("table", 2), ("", 12)], lambda _, count: count == 4, why="one more layer is one more pair"
    ),
)
def test_adapters_are_trained_and_nothing_else(named, count):
    net = model()
    before = {weight.path: weight.numpy() for weight in net.weights}
    chosen = hvdtrain.lora(net, 4, layers=named, alpha=8)
    assert len(net.trainable_variables) == count == 2 * len(chosen)
    x = trained(net)
    assert len(net.optimizer.variables) == 2 + 2 * count  # slots of adapters alone
    for weight in net.weights:
        if weight.path in before:
            np.testing.assert_array_equal(weight, before[weight.path])
    expected = net.predict(x, verbose=0)
    assert np.abs(expected - model().predict(x, verbose=0)).max() > 1e-3
    hvdtrain.merge_lora(net)
    assert [weight.path for weight in net.weights] == list(before)
    np.testing.assert_allclose(net.predict(x, verbose=0), expected, rtol=2e-4, atol=2e-5)
    assert net.trainable_variables == []


def test_a_file_has_the_adapters_alone(tmp_path):
    net = model()
    hvdtrain.lora(net, 2)
    x = trained(net)
    hvdtrain.save_lora(net, tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").stat().st_size < 4000
    other = model()
    hvdtrain.lora(other, 2)
    hvdtrain.load_lora(other, tmp_path / "a.safetensors")
    np.testing.assert_array_equal(other.predict(x, verbose=0), net.predict(x, verbose=0))
    other = model()
    hvdtrain.lora(other, 2, alpha=16)
    with pytest.raises(CheckpointError, match=r"is of adapters with alpha=2.0. Those of the model have 16.0"):
        hvdtrain.load_lora(other, tmp_path / "a.safetensors")
    for rank, named in ((4, "query|value"), (2, "query")):
        wrong = model()
        hvdtrain.lora(wrong, rank, layers=named)
        with pytest.raises(CheckpointError, match=r"is of other adapters than the model's: .*lora_kernel"):
            hvdtrain.load_lora(wrong, tmp_path / "a.safetensors")


def test_a_merged_model_is_saved_as_any_other(tmp_path):
    net = model()
    hvdtrain.lora(net, 2)
    x = trained(net)
    hvdtrain.merge_lora(net)
    net.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), net.predict(x, verbose=0))
    assert len(loaded.weights) == len(model().weights)


def test_a_frozen_model_trains_its_adapters_and_no_statistics():
    inputs = keras.Input((4,))
    net = keras.Model(inputs, layers.Dense(2, name="last")(layers.BatchNormalization(name="norm")(inputs)))
    net.trainable = False
    hvdtrain.lora(net, 1, layers="last")
    assert len(net.trainable_variables) == 2
    net.compile("sgd", "mse")
    net.fit(np.ones((8, 4)) * 3, np.ones((8, 2)), verbose=0)
    np.testing.assert_array_equal(net.get_layer("norm").moving_mean, np.zeros(4))


def test_what_can_have_no_adapters_is_refused():
    with pytest.raises(
        ConfigError, match=r"lora finds no layer whose path has 'nowhere'. Layers that can have .*table"
    ):
        hvdtrain.lora(model(), layers="nowhere")
    with pytest.raises(ConfigError, match="lora takes a rank from 1"):
        hvdtrain.lora(model(), 0)
    net = model()
    for call in (
        hvdtrain.merge_lora,
        lambda net: hvdtrain.save_lora(net, "a"),
        lambda net: hvdtrain.load_lora(net, "a"),
    ):
        with pytest.raises(ConfigError, match=r"The model has no adapters: hvdtrain.lora\(model\) gives it some"):
            call(net)
    hvdtrain.lora(net)
    with pytest.raises(ConfigError, match="The model has adapters already"):
        hvdtrain.lora(net)
    net = model()
    net.quantize("int8")
    with pytest.raises(ConfigError, match=r"lora gives no adapter to the layer .*, which is quantized: leave it out"):
        hvdtrain.lora(net)
    held = keras.Sequential([keras.Input((4,)), layers.Dense(4, kernel_constraint="non_neg", name="held")])
    with pytest.raises(ConfigError, match="which has a constraint: leave it out"):
        hvdtrain.lora(held, layers="held")
    assert len(held.trainable_variables) == 2  # nothing was frozen
    net = model()
    hvdtrain.prune(net, layers="last")
    with pytest.raises(ConfigError, match=r"The model is pruned: call hvdtrain.finish_pruning"):
        hvdtrain.lora(net)
