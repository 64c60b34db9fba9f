"""Attention for layers of one's own, which can be split along `cp`."""

from collections.abc import Callable
from typing import Any

import keras

HEAD_DIM = 2


@keras.saving.register_keras_serializable(package="hvdtrain")
class DotProductAttention(keras.layers.Layer):
    """Scaled dot-product attention of heads, without weights (Vaswani et al. 2017, arXiv:1706.03762).

    Call it in place of `keras.ops.dot_product_attention`. Along `cp` ranks exchange positions for heads before it and
    heads for positions behind it, as for `MultiHeadAttention`.

    Args:
        is_causal: whether a position attends to itself and those before it only.
        scale: factor of the products; default: 1 / sqrt(features).
        rotate: applied to query and key [batch, positions, heads, features] once all positions are there, such as a
            layer of rotary embeddings, which counts positions.

    Example::

        attend = hvdtrain.DotProductAttention(is_causal=True)
        outputs = attend(query, key, value)  # each [batch, positions, heads, features]
    """

    def __init__(
        self,
        is_causal: bool = False,
        scale: float | None = None,
        rotate: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.is_causal = is_causal
        self.scale = scale
        self.rotate = rotate

    def call(self, query: Any, key: Any, value: Any, padding_mask: Any = None) -> Any:
        """Attend.

        Args:
            query: [batch, positions, heads, features].
            key: [batch, positions, heads or a divisor of them, features].
            value: as `key`.
            padding_mask: [batch, positions], False for keys that are padding.

        Returns:
            [batch, positions, heads, features].
        """
        mask = None if padding_mask is None else keras.ops.cast(padding_mask, "bool")[:, None, None, :]
        if self.rotate is not None:
            query, key = self.rotate(query), self.rotate(key)
        queries_of_a_key = query.shape[HEAD_DIM] // key.shape[HEAD_DIM]
        if queries_of_a_key > 1:
            key, value = (keras.ops.repeat(each, queries_of_a_key, axis=HEAD_DIM) for each in (key, value))
        return keras.ops.dot_product_attention(query, key, value, mask=mask, scale=self.scale, is_causal=self.is_causal)

    def compute_output_shape(self, query_shape: Any, key_shape: Any, value_shape: Any, *masks: Any) -> Any:
        """Return the shape of the output."""
        return (*query_shape[:-1], value_shape[-1])

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        rotate = keras.saving.serialize_keras_object(self.rotate)
        return {**super().get_config(), "is_causal": self.is_causal, "scale": self.scale, "rotate": rotate}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DotProductAttention":
        """Make the layer from its arguments."""
        return cls(**{**config, "rotate": keras.saving.deserialize_keras_object(config["rotate"])})
