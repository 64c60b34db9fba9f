"""Attention for layers of one's own; its split along cp is in parallel/context."""

import keras
import numpy as np
import pytest

import hvdtrain

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.standard_normal((3, 6, heads, 4)).astype("float32") for heads in (4, 2, 2))
MASK = np.arange(6) < np.array([[6], [4], [2]])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
def test_heads_attend_as_in_keras(is_causal, mask):
    attend = hvdtrain.DotProductAttention(is_causal=is_causal, scale=0.3)
    key, value = (np.repeat(each, 2, axis=2) for each in (KEY, VALUE))
    keys = None if mask is None else mask[:, None, None, :]
    expected = keras.ops.dot_product_attention(QUERY, key, value, mask=keys, scale=0.3, is_causal=is_causal)
    np.testing.assert_allclose(attend(QUERY, KEY, VALUE, mask), expected, rtol=1e-5, atol=1e-6)
    assert attend.compute_output_shape(QUERY.shape, KEY.shape, VALUE.shape) == expected.shape


def test_a_rotation_is_applied_to_queries_and_keys():
    rotated = hvdtrain.DotProductAttention(rotate=keras.layers.Rescaling(2.0))(QUERY, KEY, VALUE)
    expected = hvdtrain.DotProductAttention()(2 * QUERY, 2 * KEY, VALUE)
    np.testing.assert_allclose(rotated, expected, rtol=1e-5, atol=1e-6)


def test_it_is_saved_with_its_arguments():
    attend = hvdtrain.DotProductAttention(is_causal=True, scale=0.3, rotate=keras.layers.Rescaling(2.0))
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(attend))
    assert (again.is_causal, again.scale, again.rotate.scale) == (True, 0.3, 2.0)
    np.testing.assert_array_equal(again(QUERY, KEY, VALUE), attend(QUERY, KEY, VALUE))
    assert hvdtrain.DotProductAttention.from_config(hvdtrain.DotProductAttention().get_config()).rotate is None
