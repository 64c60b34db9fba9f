"""Outputs sharded along the last dim, such as logits along the vocabulary."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import tensorflow as tf

from hvdtrain.backends.differentiable import gather_from
from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras import mask_of, set_mask
from hvdtrain.runtime.compiled import numbered
from hvdtrain.runtime.placement import even_slice

_ATTRIBUTE = "_hvdtrain_shard"


@dataclass(frozen=True)
class Shard:
    """A rank's shard of an output's last dim."""

    exchange: Collectives
    """The tensor-parallel group."""
    length: int
    """Size of the sharded dim in the full output, e.g. the vocabulary."""

    @property
    def own(self) -> slice:
        """This rank's index range."""
        return even_slice(self.length, self.exchange.size, self.exchange.index)


class OutputLayout:
    """Gathers a model's sharded outputs for its callers, except within `kept`; one subclass per way to shard."""

    attribute: ClassVar[str]
    """Attribute of the model that holds its layout."""
    _kept = False

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Return a model's layout of this kind; None if its outputs are full."""
        layout: Self | None = vars(model).get(cls.attribute)
        return layout

    def tagged(self, outputs: Any) -> Any:
        """Mark the shards among `outputs`."""
        raise NotImplementedError

    def gathered(self, outputs: Any) -> Any:
        """All-gather marked outputs. Collective."""
        raise NotImplementedError

    def install(self, model: Any) -> None:
        """Gather outputs for callers of `model`, except within `kept`."""
        inner = model.call

        def call(*args: Any, **options: Any) -> Any:
            outputs = self.tagged(inner(*args, **options))
            return outputs if self._kept else self.gathered(outputs)

        vars(model)["call"] = call
        vars(model)[self.attribute] = self

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Return sharded outputs to callers of the model inside this context."""
        before, self._kept = self._kept, True
        try:
            yield
        finally:
            self._kept = before


class OutputShards(OutputLayout):
    """Outputs sharded along the last dim.

    `lengths` are the full sizes of the last dim of each flattened output, None if not sharded.
    """

    attribute = "_hvdtrain_output_shards"

    def __init__(self, exchange: Collectives, lengths: Sequence[int | None]) -> None:
        self._shards = [None if length is None else Shard(exchange, length) for length in lengths]

    def tagged(self, outputs: Any) -> Any:
        """Mark the shards among `outputs`; see `shard_of`."""
        for tensor, shard in zip(tf.nest.flatten(outputs), self._shards, strict=True):
            if shard is not None:
                setattr(tensor, _ATTRIBUTE, shard)
        return outputs

    def gathered(self, outputs: Any) -> Any:
        """All-gather marked outputs. Collective along tp."""
        return gathered(outputs)


def kept_outputs(kind: type[OutputLayout], model: Any, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `forward`, the model or its layers, keeping outputs that are sharded by `kind`."""
    layout = kind.of(model)
    if layout is None:
        return forward(*args, **options)
    with layout.kept():
        return layout.tagged(forward(*args, **options))


def shard_of(tensor: Any) -> Shard | None:
    """Return the shard in `tensor`; None if full."""
    return getattr(tensor, _ATTRIBUTE, None)


def gathered(outputs: Any) -> Any:
    """All-gather marked outputs. Collective along tp."""
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
