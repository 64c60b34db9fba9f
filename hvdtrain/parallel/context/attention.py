"""Attention over a sequence of which each rank has a slice: positions are exchanged for heads, and back.

After the projections a rank has all heads of its positions. An all-to-all gives it all positions of some heads, for
which it computes attention as one process would, and another one gives it its own positions back.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.backends.differentiable import exchange_parts, gather_to
from hvdtrain.compat.keras import attention_axes, mask_of, query_kernel, replace_attention
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.parallel.context.group import Group
from hvdtrain.parallel.context.positions import POSITION_DIM
from hvdtrain.parallel.tensor.layers.attention import KINDS
from hvdtrain.parallel.tensor.layers.base import calls_as, described, replace_call
from hvdtrain.runtime.compiled import numbered

MASKS = ("query_mask", "value_mask", "key_mask")
HEAD_DIM = 2
"""The dim of projections [batch, positions, heads, features] that counts heads."""


def is_attention(layer: Any) -> bool:
    """Whether a layer calls as Keras' attention by heads; it may compute its own for all positions of some heads."""
    return any(calls_as(layer, kind) for kind in KINDS)


def split_attention(layer: Any, group: Group, name: str) -> None:
    """Let an attention layer see all positions, of which each rank has a slice.

    Args:
        layer: a MultiHeadAttention or GroupQueryAttention.
        group: the ranks.
        name: of the layer, the same on all ranks.

    Raises:
        ConfigError: heads that the ranks do not divide, or attention over other dims.
    """
    _check(layer, group.exchange.size)
    exchange = _Exchange(group, name)

    def attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        if not group.cuts:
            return whole_attention(query, key, value, *args, **options)
        outputs, scores = whole_attention(*exchange.heads(query, key, value), *args, **options)
        return exchange.own_positions(outputs), scores

    def attention_mask(query: Any, value: Any, *args: Any, **options: Any) -> Any:
        if not group.cuts:
            return whole_mask(query, value, *args, **options)
        masks = dict(zip(MASKS, args, strict=False)) | options
        masks |= {each: exchange.whole_mask(masks[each]) for each in MASKS if masks.get(each) is not None}
        return whole_mask(_of_length(query, group), _of_length(value, group), **masks)

    whole_attention, whole_mask = replace_attention(layer, attention=attention, mask=attention_mask)
    _note(layer, group)


def _check(layer: Any, ranks: int) -> None:
    axes = attention_axes(layer) or (POSITION_DIM,)
    if axes != (POSITION_DIM,):
        raise ConfigError(
            f"{described(layer)} attends along the dims {axes}, and cp={ranks} cuts dim {POSITION_DIM} of "
            f"[batch, positions, features]: leave cp out of {opt('parallel')}, or attention_axes out of the layer."
        )
    heads = int(query_kernel(layer).shape[1])
    if heads % ranks:
        raise ConfigError(
            f"cp={ranks} does not divide the heads of {described(layer)}, of which each rank computes some. Received: "
            f"{heads} heads on a rank. Choose a cp that divides them, times tp where there is one."
        )


class _Exchange:
    """The messages of one attention layer."""

    def __init__(self, group: Group, name: str) -> None:
        self._exchange = group.exchange
        self._name = name

    def heads(self, query: Any, key: Any, value: Any) -> Sequence[Any]:
        """Return all positions of this rank's heads, in one message where the three have one shape."""
        parts = (query, key, value)
        if query.shape[:3].as_list() != key.shape[:3].as_list():
            return [self._to_heads(part, role) for part, role in zip(parts, ("query", "key", "value"), strict=True)]
        together = self._to_heads(tf.concat(parts, -1), "query_key_value")
        return tf.split(together, [part.shape[-1] for part in parts], -1)

    def _to_heads(self, x: Any, role: str) -> Any:
        return exchange_parts(x, self._exchange, HEAD_DIM, POSITION_DIM, name=numbered(f"{self._name}/{role}"))

    def own_positions(self, x: Any) -> Any:
        """Return this rank's positions of all heads."""
        return exchange_parts(x, self._exchange, POSITION_DIM, HEAD_DIM, name=numbered(f"{self._name}/output"))

    def whole_mask(self, mask: Any) -> Any:
        """Return the mask of all positions, from that of this rank's."""
        numbers = gather_to(tf.cast(mask, tf.int32), self._exchange, POSITION_DIM, name=numbered(f"{self._name}/mask"))
        return tf.cast(numbers, tf.bool)


def _of_length(x: Any, group: Group) -> Any:
    """Return a stand-in for the whole of `x`: masks by position, such as the causal one, look at its length alone."""
    known = x.shape[POSITION_DIM]
    own = tf.shape(x)[POSITION_DIM] if known is None else known
    return tf.zeros([1, own * group.exchange.size, 1])


def _note(layer: Any, group: Group) -> None:
    """Let an attention layer note what it takes and gives."""
    whole_call = layer.call

    def call(query: Any, value: Any, key: Any = None, **options: Any) -> Any:
        if options.get("return_attention_scores"):
            raise ConfigError(
                f"{described(layer)} computes some heads on each rank along cp, and none has the scores of all: leave "
                f"out return_attention_scores=True, or cp in {opt('parallel')}."
            )
        with group.record.call(described(layer)) as flow:
            inputs = [x for x in (query, value, key) if x is not None]
            # Keras' attention takes the masks off its inputs.
            masks = [*(mask_of(x) for x in inputs), *(options.get(name) for name in MASKS)]
            outputs = whole_call(query, value, key, **options)
            if group.cuts:
                taken = [*inputs, *(mask for mask in masks if mask is not None)]
                flow.takes += [(x, POSITION_DIM - x.shape.rank) for x in taken]
                flow.gives.append((outputs, POSITION_DIM - outputs.shape.rank))
            return outputs

    replace_call(layer, call)
