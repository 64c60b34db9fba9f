"""Outputs of a model of which each rank has a slice along the last dim, such as logits along the vocabulary."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.backends.differentiable import gather_from
from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras import mask_of, set_mask
from hvdtrain.runtime.compiled import numbered
from hvdtrain.runtime.placement import even_slice

_ATTRIBUTE = "_hvdtrain_shard"
_LAYOUT = "_hvdtrain_output_shards"


@dataclass(frozen=True)
class Shard:
    """Which slice of the last dim of an output a tensor is."""

    exchange: Collectives
    """The ranks that hold the others."""
    length: int
    """Of the dim in the whole output: the number of classes of logits."""

    @property
    def own(self) -> slice:
        """The slice."""
        return even_slice(self.length, self.exchange.size, self.exchange.index)


class OutputShards:
    """Which outputs of a model are slices, and whether its callers get them as they are.

    Args:
        exchange: the ranks that hold the other slices.
        lengths: of the last dim of each output in the whole model, in the order in which they are flattened; None for
            an output that is no slice.
    """

    def __init__(self, exchange: Collectives, lengths: Sequence[int | None]) -> None:
        self._shards = [None if length is None else Shard(exchange, length) for length in lengths]
        self._kept = False

    def install(self, model: Any) -> None:
        """Let whoever calls `model` get whole outputs, unless within `kept`."""
        whole_call = model.call

        def call(*args: Any, **options: Any) -> Any:
            outputs = self.tagged(whole_call(*args, **options))
            return outputs if self._kept else gathered(outputs)

        vars(model)["call"] = call
        vars(model)[_LAYOUT] = self

    def tagged(self, outputs: Any) -> Any:
        """Mark the slices among `outputs` as such."""
        for tensor, shard in zip(tf.nest.flatten(outputs), self._shards, strict=True):
            if shard is not None:
                setattr(tensor, _ATTRIBUTE, shard)
        return outputs

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let callers of the model get slices inside this context."""
        before, self._kept = self._kept, True
        try:
            yield
        finally:
            self._kept = before


def shard_of(tensor: Any) -> Shard | None:
    """Return which slice of an output `tensor` is; None if it is whole."""
    return getattr(tensor, _ATTRIBUTE, None)


def gathered(outputs: Any) -> Any:
    """Return outputs with whole ones in place of the slices; every rank that holds a slice calls it."""
    return tf.nest.map_structure(_gathered, outputs)


def _gathered(tensor: Any) -> Any:
    shard = shard_of(tensor)
    if shard is None:
        return tensor
    last = tensor.shape.rank - 1
    whole = gather_from(tensor, shard.exchange, last, name=numbered("tensor/outputs"), length=shard.length)
    mask = mask_of(tensor)
    if mask is not None:
        set_mask(whole, mask)
    return whole


def tagged_outputs(model: Any, outputs: Any) -> Any:
    """Mark the slices among `outputs`, which the layers of `model` have given one by one."""
    shards: OutputShards | None = vars(model).get(_LAYOUT)
    return outputs if shards is None else shards.tagged(outputs)


def sharded_outputs(model: Any, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `forward`, which is `model` or calls its layers, and leave slices among its outputs as they are."""
    shards: OutputShards | None = vars(model).get(_LAYOUT)
    if shards is None:
        return forward(*args, **options)
    with shards.kept():
        return shards.tagged(forward(*args, **options))
