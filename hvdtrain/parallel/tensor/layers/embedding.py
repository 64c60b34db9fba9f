"""Embeddings whose table is cut along the vocabulary or the width."""

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.differentiable import gather_from
from hvdtrain.compat.keras import embeddings_of, set_mask
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.cuts import Cut
from hvdtrain.parallel.tensor.layers.base import (
    Group,
    check_additive,
    computes_as,
    described,
    refuse_other_weights,
    replace_call,
)
from hvdtrain.runtime.compiled import numbered


class SlicedEmbedding:
    """An Embedding, or a ReversibleEmbedding, with a cut table.

    Along the vocabulary each rank looks up the tokens whose rows it has, and the others' count as zeros in the sum.
    Along the width each rank looks up its columns, which are gathered. A reversible one that is cut along the
    vocabulary gives each rank the logits of its tokens.

    Raises:
        ConfigError: a reversible one that is cut along the width, or has a second table that is cut otherwise.
    """

    def __init__(self, layer: Any, cuts: dict[int, Cut]) -> None:
        self._layer = layer
        self._cut = cuts.get(id(embeddings_of(layer)))
        self._reverse = cuts.get(id(getattr(layer, "reverse_embeddings", None)))
        refuse_other_weights(layer)
        check_additive(embeddings_of(layer), layer)
        if not isinstance(layer, keras.layers.ReversibleEmbedding):
            return
        held = {"embeddings": (self._cut, 0)}
        if not layer.tie_weights:
            held["reverse_embeddings"] = (self._reverse, 1)
        for name, (cut, dim) in held.items():
            if cut is None or cut.dim != dim:
                raise ConfigError(
                    f"{described(layer)} is cut along the vocabulary: dim 0 of its embeddings, and dim 1 of its "
                    f"reverse_embeddings where it has them. Received: {name} "
                    f"{'whole' if cut is None else f'cut along dim {cut.dim}'}."
                )

    def further_cuts(self) -> dict[int, tuple[Any, Cut]]:
        """See `SlicedLayer`: none."""
        return {}

    def shared(self) -> list[Any]:
        """See `SlicedLayer`: none."""
        return []

    def install(self, group: Group, name: str) -> None:
        """See `SlicedLayer`."""
        layer, whole_call = self._layer, self._layer.call
        assert self._cut is not None, "a layer is made for a cut"
        look_up = self._by_vocabulary(group, name) if self._cut.dim == 0 else self._by_width(group, name)

        def call(inputs: Any, reverse: bool = False) -> Any:
            with group.record.call(described(layer)) as flow:
                if not reverse:
                    outputs = look_up(inputs)
                    _set_mask(layer, inputs, outputs)
                    return outputs
                outputs = whole_call(group.enter(inputs, f"{name}/reverse", flow), reverse=True)
                flow.gives.append((outputs, -1))
                return outputs

        reversible = isinstance(layer, keras.layers.ReversibleEmbedding)
        replace_call(layer, call if reversible else lambda inputs: call(inputs))

    def _by_vocabulary(self, group: Group, name: str) -> Any:
        layer, cut = self._layer, self._cut
        assert cut is not None

        def look_up(inputs: Any) -> Any:
            vocabulary = cut.whole[0]
            tokens = tf.cast(inputs, tf.int32) if inputs.dtype not in (tf.int32, tf.int64) else inputs
            tokens = tf.where(tokens < 0, tokens + vocabulary, tokens)  # as Keras counts them
            own = (tokens >= cut.start) & (tokens < cut.start + cut.length)
            known = (tokens >= 0) & (tokens < vocabulary)
            # The look-up refuses a token that no rank knows, as it does in one process.
            others = tf.where(known, tf.zeros_like(tokens), vocabulary + tf.abs(tokens))
            rows = tf.where(own, tokens - cut.start, others)
            found = keras.ops.take(layer.embeddings, rows, axis=0)
            found = tf.where(own[..., tf.newaxis], found, tf.zeros_like(found))
            return tf.cast(group.add_up(found, name), layer.compute_dtype)

        return look_up

    def _by_width(self, group: Group, name: str) -> Any:
        whole_call = self._layer.call

        def look_up(inputs: Any) -> Any:
            found = whole_call(inputs)
            return gather_from(found, group.exchange, found.shape.rank - 1, name=numbered(f"{name}/output"))

        return look_up


def is_embedding(layer: Any) -> bool:
    """Whether a layer is one of Keras' embeddings."""
    return any(computes_as(layer, kind) for kind in (keras.layers.Embedding, keras.layers.ReversibleEmbedding))


def _set_mask(layer: Any, inputs: Any, outputs: Any) -> None:
    """Mark padding as ReversibleEmbedding does in its call; Embedding does so behind it."""
    if layer.mask_zero and isinstance(layer, keras.layers.ReversibleEmbedding):
        set_mask(outputs, keras.ops.not_equal(inputs, 0))
