"""What `hvdtrain.compat.keras_attention` takes for granted of Keras' attention layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.compat import keras_attention as compat
from hvdtrain.config.errors import CompatibilityError
from tests.unit.compat.contracts import Contracts

CONTRACTS = Contracts(compat, "keras")


def attention(kind=keras.layers.MultiHeadAttention):
    grouped = kind is keras.layers.GroupQueryAttention
    layer = kind(4, 2, 1) if grouped else kind(2, 4)
    layer(tf.ones([1, 3, 8]), tf.ones([1, 3, 8]))
    return layer


@CONTRACTS.of(compat.replace_attention)
def attends_by_our_functions():
    for kind in (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention):
        layer, seen, own = attention(kind), [], []
        x = tf.random.normal([2, 3, 8])

        def counted(query, *args, seen=seen, own=own, **options):
            seen.append(query.shape)
            return own[0](query, *args, **options)

        def masked(*args, seen=seen, own=own, **options):
            seen.append("mask")
            return own[1](*args, **options)

        before = layer(x, x, use_causal_mask=True)
        own += compat.replace_attention(layer, attention=counted, mask=masked)
        np.testing.assert_allclose(layer(x, x, use_causal_mask=True), before, rtol=1e-6)
        assert (2, 3, 2, 4) in seen
        layer(x, x, attention_mask=tf.ones([2, 3, 3], tf.bool))
        assert "mask" in seen


@CONTRACTS.of(compat.query_kernel, compat.attention_axes, compat.attention_projections)
def knows_the_parts_of_attention():
    layer, grouped = attention(), attention(keras.layers.GroupQueryAttention)
    assert compat.query_kernel(layer).shape == (8, 2, 4)
    assert (compat.attention_axes(layer), compat.attention_axes(grouped)) == ((1,), ())
    projections = compat.attention_projections(layer)
    assert [compat.kernel_of(inner).shape[heads] for inner, heads in projections] == [2, 2, 2, 2]
    assert len(compat.attention_projections(grouped)) == 4
    assert {id(v) for inner, _ in projections for v in inner.variables} == {id(v) for v in layer.variables}


test_contract, test_every_function_has_a_contract = CONTRACTS.tests()


def test_an_attention_that_is_computed_elsewhere_is_refused(monkeypatch):
    """Each rank would attend to its own positions alone."""
    layer = attention()
    compat.replace_attention(layer, attention=layer._compute_attention, mask=layer._compute_attention_mask)
    x = tf.ones([1, 3, 8])
    layer(x, x)
    other = attention()
    monkeypatch.setattr(type(other), "call", lambda self, query, value, **options: query)
    compat.replace_attention(other, attention=other._compute_attention, mask=other._compute_attention_mask)
    with pytest.raises(CompatibilityError, match=r"MultiHeadAttention\.call attends by _compute_attention"):
        other(x, x)
