"""The exchange of gradients: the one piece behind the tape, the training step and whatever accumulates."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from hvdtrain.backends.protocol import Exchange, ReduceOp
from hvdtrain.config.errors import ConfigError

Gradient: TypeAlias = Any
"""A tf.Tensor, tf.IndexedSlices or None."""
Compression = Literal["none", "fp16"]


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients travel.

    Args:
        op: average over the replicas, sum, or Adasum.
        compression: `fp16` sends floats wider than 16 bits as 16-bit ones.
        groups: 0 sends every gradient by itself, as soon as it is there; n forms n groups that leave whole;
            tuples of variables' paths name the groups, and what is in none of them leaves by itself.
        sparse_as_dense: turn IndexedSlices into dense tensors before the exchange.
        predivide: with op average, divide by this factor before the sum and by size / factor after it.
    """

    op: ReduceOp = "average"
    compression: Compression = "none"
    groups: int | tuple[tuple[str, ...], ...] = 0
    sparse_as_dense: bool = False
    predivide: float = 1.0

    def __post_init__(self) -> None:
        if self.op not in ("sum", "average", "adasum"):
            raise ConfigError(f"op must be one of average, sum, adasum. Received: {self.op!r}.")
        if self.compression not in ("none", "fp16"):
            raise ConfigError(f"compression must be none or fp16. Received: {self.compression!r}.")
        if isinstance(self.groups, int) and self.groups < 0:
            raise ConfigError(f"groups must not be negative. Received: {self.groups}.")
        if self.predivide <= 0:
            raise ConfigError(f"gradient_predivide_factor must be positive. Received: {self.predivide}.")
        if self.predivide != 1.0 and self.op != "average":
            raise ConfigError(f"gradient_predivide_factor needs op average. Received: op {self.op!r}.")
        if self.op == "adasum" and self.compression != "none":
            raise ConfigError("Adasum is not compressed: use compression none.")
        if self.groups and self.op == "adasum":
            raise ConfigError("Adasum reduces each gradient by itself: groups must be 0.")


def sum_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Add up the rows of `slices` that share an index.

    Keras' adaptive optimizers apply each occurrence of an index as an update of its own, which is
    not the gradient of the sum.
    """
    indices, position = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, position, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


class GradientReducer:
    """Reduces a list of gradients over the replicas of an exchange."""

    def __init__(self, exchange: Exchange, options: ReductionOptions | None = None) -> None:
        self._exchange = exchange
        self._options = options or ReductionOptions()

    def reduce(self, gradients: Sequence[Gradient], paths: Sequence[str], *, role: str = "gradient") -> list[Gradient]:
        """Return the reduced gradients, in the order given; None stays None.

        Args:
            gradients: dense tensors or IndexedSlices of any float dtype; the same structure on every replica.
            paths: the path of each gradient's variable; with `role` it is what matches the replicas' tensors.
            role: tells apart several reductions of the same variables.
        """
        reduced: list[Gradient] = list(gradients)
        dense: list[int] = []
        for i, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                if self._options.sparse_as_dense:
                    reduced[i] = tf.convert_to_tensor(gradient)
                    dense.append(i)
                else:
                    reduced[i] = self._reduce_sparse(gradient, f"{role}/{paths[i]}")
            elif gradient is not None:
                dense.append(i)
        for number, group in enumerate(self._groups(dense, paths)):
            self._reduce_group(reduced, group, f"{role}/group{number}")
            dense = [i for i in dense if i not in group]
        for i in dense:
            reduced[i] = self._reduce_dense(reduced[i], f"{role}/{paths[i]}")
        return reduced

    def _groups(self, dense: Sequence[int], paths: Sequence[str]) -> list[Sequence[int]]:
        """Return the places of the gradients that leave together."""
        groups = self._options.groups
        if isinstance(groups, int):
            return _split(dense, groups)
        return [[i for i in dense if paths[i] in group] for group in groups]

    def _factors(self) -> tuple[float, float]:
        """Return what multiplies a sum's inputs and its result."""
        if self._options.op != "average":
            return 1.0, 1.0
        before = 1.0 / self._options.predivide
        return before, self._options.predivide / self._exchange.size

    def _reduce_dense(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        if self._options.op == "adasum":
            return self._exchange.all_reduce(tensor, name=name, op="adasum")
        wire, scale = self._compress(tensor)
        before, after = self._factors()
        result = self._exchange.all_reduce(wire, name=name, prescale=before, postscale=after)
        return self._decompress(result, tensor.dtype, scale)

    def _reduce_group(self, gradients: list[Any], group: Sequence[int], name: str) -> None:
        """Replace the members of `group` among `gradients`; one message holds one dtype."""
        before, after = self._factors()
        wires = {i: self._compress(gradients[i]) for i in group}
        for dtype in dict.fromkeys(wire.dtype for wire, _ in wires.values()):
            members = [i for i in group if wires[i][0].dtype == dtype]
            results = self._exchange.grouped_all_reduce(
                [wires[i][0] for i in members], name=f"{name}/{dtype.name}", prescale=before, postscale=after
            )
            for i, result in zip(members, results, strict=True):
                gradients[i] = self._decompress(result, gradients[i].dtype, wires[i][1])

    def _compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, float]:
        """Return the tensor as it travels, and the factor that undoes its scaling.

        Half precision ends at 65504: dividing by the number of replicas first keeps their sum in range.
        """
        if self._options.compression == "none" or tensor.dtype not in (tf.float32, tf.float64):
            return tensor, 1.0
        size = float(self._exchange.size)
        return tf.cast(tensor / tf.cast(size, tensor.dtype), tf.float16), size

    def _decompress(self, tensor: tf.Tensor, dtype: tf.DType, scale: float) -> tf.Tensor:
        wide = tf.cast(tensor, dtype)
        return wide if scale == 1.0 else wide * tf.cast(scale, dtype)

    def _reduce_sparse(self, slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        if self._options.op == "adasum":
            raise ConfigError("Adasum is not defined on sparse gradients: use sparse_as_dense=True.")
        values = self._exchange.all_gather(slices.values, name=f"{name}/values")
        indices = self._exchange.all_gather(slices.indices, name=f"{name}/indices")
        if self._options.op == "average":
            values = values / tf.cast(self._exchange.size, values.dtype)
        return sum_duplicates(tf.IndexedSlices(values, indices, slices.dense_shape))


def _split(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Cut `items` into at most `parts` runs of nearly equal length, none of them empty."""
    parts = min(parts, len(items))
    bounds = [len(items) * i // parts for i in range(parts + 1)] if parts else [0]
    return [items[a:b] for a, b in pairwise(bounds)]
