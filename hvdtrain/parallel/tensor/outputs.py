"""Outputs of a model of which each rank has a slice along the last dim, such as logits along the vocabulary."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.backends.differentiable import gather_from
from hvdtrain.backends.protocol import Collectives
from hvdtrain.runtime.compiled import numbered

_ATTRIBUTE = "_hvdtrain_shard"
_LAYOUT = "_hvdtrain_output_shards"


@dataclass(frozen=True)
class Shard:
    """Which slice of the last dim of an output a tensor is."""

    exchange: Collectives
    """The ranks that hold the others."""

    @property
    def index(self) -> int:
        """The place of the slice."""
        return self.exchange.index


class OutputShards:
    """Which outputs of a model are slices, and whether its callers get them as they are.

    Args:
        exchange: the ranks that hold the other slices.
        sharded: whether each output is a slice, in the order in which they are flattened.
    """

    def __init__(self, exchange: Collectives, sharded: list[bool]) -> None:
        self._shard = Shard(exchange)
        self._sharded = sharded
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
        for tensor, sharded in zip(tf.nest.flatten(outputs), self._sharded, strict=True):
            if sharded:
                setattr(tensor, _ATTRIBUTE, self._shard)
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
    whole = gather_from(tensor, shard.exchange, tensor.shape.rank - 1, name=numbered("tensor/outputs"))
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        whole._keras_mask = mask
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
