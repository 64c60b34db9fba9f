"""Which layers get fewer bits, and what is refused."""

import keras
import numpy as np
import pytest
from keras import layers

from hvdtrain.config.errors import ConfigError
from hvdtrain.export.quantize import Blocks, quantize
from hvdtrain.export.tensors import quantization_of
from hvdtrain.models.transformer import build


def dense():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu", name="inner"), layers.Dense(3, name="last")])


def transformer():
    return build((8,), 20, seed=0, depth=2, width=16, heads=2)


def test_an_expression_chooses_layers():
    model = dense()
    left = quantize(model, "int8", "inn", None)
    assert [quantization_of(layer) for layer in model.layers] == ["int8", None]
    assert left == "Not quantized: 1 Dense (27 weights stay float32)"
    assert quantize(dense(), "int8", None, None) == ""


@pytest.mark.parametrize(
    ("model", "layers_named", "message"),
    [
        (dense, "output", "--quantize int8: No layer's path has 'output'"),
        (
            lambda: keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(2, 3)]),
            None,
            "Keras quantizes no layer of this model by it, which has Conv2D. The format litert quantizes convolutions",
        ),
    ],
)
def test_where_nothing_is_quantized_it_is_said(model, layers_named, message):
    with pytest.raises(ConfigError) as refused:
        quantize(model(), "int8", layers_named, None)
    assert message in str(refused.value)


@pytest.mark.parametrize("mode", ["gptq", "awq"])
def test_modes_with_samples_are_for_language_models(mode):
    with pytest.raises(ConfigError, match="is for language models: tokens in, and blocks that follow one another"):
        quantize(dense(), mode, None, np.ones((4, 6), np.float32))
    with pytest.raises(ConfigError, match="is for language models"):
        quantize(transformer(), mode, None, None)


def test_blocks_follow_one_another():
    model, tokens = transformer(), np.random.default_rng(0).integers(0, 20, (3, 8), np.int32)
    blocks = Blocks(model)
    assert len(blocks.found) == 4  # attention and MLP of each block
    x = blocks.before(tokens)
    for block in blocks.found:
        x = block(x)
    expected = keras.Model(model.input, model.get_layer("block1_mlp_add").output)(tokens)
    np.testing.assert_allclose(x, expected, rtol=1e-6)
    inner = {layer.name for block in blocks.found for layer in block.layers}
    assert {"block0_attention", "block1_mlp_out"} <= inner
    assert not inner & {"logits", "tokens_embedding", "final_norm"}


def test_a_model_of_one_path_has_no_blocks():
    assert Blocks(dense()).found == []
    inputs = keras.Input((4, 6))
    assert Blocks(keras.Model(inputs, layers.Dense(6)(layers.Dense(6)(inputs)))).found == []


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["gptq", "awq"])
def test_what_is_calibrated_is_nearer_than_what_is_rounded(mode):
    """Within the blocks, whose weights all modes store in 4 bits."""
    draws = np.random.default_rng(0)
    tokens = draws.integers(0, 20, (16, 8), np.int32)
    expected = transformer().predict(tokens, verbose=0)

    def error(of):
        model = transformer()
        quantize(model, of, "block", tokens)
        return np.abs(model.predict(tokens, verbose=0) - expected).mean()

    assert 0 < error(mode) < error("int4") * (1.0 if mode == "gptq" else 1.5)
