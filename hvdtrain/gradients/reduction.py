"""The exchange of gradients: the one piece behind the tape, the training step and whatever accumulates."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias, cast

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives, ReduceOp
from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.compression import WireFormat, compressed_sum, is_compressible
from hvdtrain.gradients.sparse import as_rows, gather_rows, gathering_is_cheaper, is_small, sum_duplicates

Gradient: TypeAlias = Any
"""A tf.Tensor, tf.IndexedSlices or None."""
Compression = Literal["none", "fp16", "bf16"]


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients travel.

    Args:
        op: average over the replicas, sum, or Adasum.
        compression: `fp16` and `bf16` send dense float32 and float64 gradients in 16 bits and add them up in their own
            (see `compression`). Other dtypes, gathered rows, and what a single replica has, stay as they are.
        groups: 0 sends every gradient by itself, as soon as it is there; n forms n groups that leave whole;
            tuples of variables' paths name the groups, and what is in none of them leaves by itself. Compressed
            gradients that are in no group form one.
        sparse_as_dense: True turns tf.IndexedSlices into dense tensors, False gathers their rows; None does what moves
            fewer bytes.
        predivide: divide by this factor before the sum, and multiply by it (divide by size / factor for an average)
            after it.
    """

    op: ReduceOp = "average"
    compression: Compression = "none"
    groups: int | tuple[tuple[str, ...], ...] = 0
    sparse_as_dense: bool | None = None
    predivide: float = 1.0

    def __post_init__(self) -> None:
        if self.op not in ("sum", "average", "adasum"):
            raise ConfigError(f"op must be one of average, sum, adasum. Received: {self.op!r}.")
        if self.compression not in ("none", "fp16", "bf16"):
            raise ConfigError(f"compression must be one of none, fp16, bf16. Received: {self.compression!r}.")
        if isinstance(self.groups, int) and self.groups < 0:
            raise ConfigError(f"groups must not be negative. Received: {self.groups}.")
        self._check_named_groups()
        if self.predivide <= 0:
            raise ConfigError(f"gradient_predivide_factor must be positive. Received: {self.predivide}.")
        if self.predivide != 1.0 and self.op == "adasum":
            raise ConfigError("gradient_predivide_factor is for sums and averages. Received: op 'adasum'.")
        if self.op == "adasum" and self.compression != "none":
            raise ConfigError("Adasum is not compressed: use compression none.")
        if self.groups and self.op == "adasum":
            raise ConfigError("Adasum reduces each gradient by itself: groups must be 0.")

    def _check_named_groups(self) -> None:
        """Refuse a variable in two groups: its gradient would be summed twice."""
        if not isinstance(self.groups, int):
            paths = [path for group in self.groups for path in group]
            twice = next((path for path in paths if paths.count(path) > 1), None)
            if twice is not None:
                raise ConfigError(f"groups must not share a variable. Received: {twice!r} more than once.")


def scaled(gradient: Gradient, factor: Any) -> Gradient:
    """Multiply a gradient, dense or sparse, by a scalar; None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    # tf.cast would take a Python number through float32.
    return gradient * (tf.cast(factor, gradient.dtype) if tf.is_tensor(factor) else factor)


class GradientReducer:
    """Reduces a list of gradients over the replicas of an exchange."""

    def __init__(self, exchange: Collectives, options: ReductionOptions | None = None) -> None:
        self._exchange = exchange
        self._options = options or ReductionOptions()

    def reduce(
        self,
        gradients: Sequence[Gradient],
        paths: Sequence[str],
        *,
        role: str = "gradient",
        exact: Collection[str] = (),
    ) -> list[Gradient]:
        """Return the reduced gradients, in the order given; None stays None.

        Args:
            gradients: dense tensors or IndexedSlices of any float dtype; the same structure on every replica.
            paths: the path of each gradient's variable; with `role` it is what matches the replicas' tensors.
            role: tells apart several reductions of the same variables.
            exact: paths of what must not be compressed: counts and weights that ride along.
        """
        reduced = [self._prepared(gradient) for gradient in gradients]
        sparse = [i for i, gradient in enumerate(reduced) if isinstance(gradient, tf.IndexedSlices)]
        self._reduce_sparse(reduced, sparse, [f"{role}/{path}" for path in paths], f"{role}/rows")
        dense = [i for i, gradient in enumerate(reduced) if gradient is not None and i not in sparse]
        compressed = [i for i in dense if paths[i] not in exact and self._is_compressed(reduced[i].dtype)]
        self._reduce_compressed(reduced, compressed, paths, role)
        self._reduce_plain(reduced, [i for i in dense if i not in compressed], paths, role)
        return reduced

    def _is_compressed(self, dtype: tf.DType) -> bool:
        return self._options.compression != "none" and self._exchange.size > 1 and is_compressible(dtype)

    def _reduce_plain(self, gradients: list[Any], dense: Sequence[int], paths: Sequence[str], role: str) -> None:
        """Replace the gradients at `dense`."""
        groups = self._groups(dense, paths)
        for number, group in enumerate(groups):
            self._reduce_group(gradients, group, f"{role}/group{number}")
        for i in _others(dense, groups):
            gradients[i] = self._reduce_dense(gradients[i], f"{role}/{paths[i]}")

    def _reduce_compressed(self, gradients: list[Any], dense: Sequence[int], paths: Sequence[str], role: str) -> None:
        """Replace the gradients at `dense`, those that are in no group together."""
        groups = self._groups(dense, paths)
        for number, group in enumerate(groups):
            self._reduce_buffers(gradients, group, f"{role}/group{number}")
        self._reduce_buffers(gradients, _others(dense, groups), role)

    def _reduce_buffers(self, gradients: list[Any], group: Sequence[int], name: str) -> None:
        """Replace the members of `group` by way of one compressed buffer for each dtype."""
        before, after = self._factors()
        wire = cast(WireFormat, self._options.compression)
        for dtype in dict.fromkeys(gradients[i].dtype for i in group):
            members = [i for i in group if gradients[i].dtype == dtype]
            sums = compressed_sum(
                [gradients[i] for i in members],
                self._exchange,
                wire,
                name=f"{name}/compressed/{dtype.name}",
                prescale=before,
                postscale=after,
            )
            for i, total in zip(members, sums, strict=True):
                gradients[i] = total

    def _groups(self, dense: Sequence[int], paths: Sequence[str]) -> list[Sequence[int]]:
        """Return the places of the gradients that leave together."""
        groups = self._options.groups
        if isinstance(groups, int):
            return _split(dense, groups)
        return [[i for i in dense if paths[i] in group] for group in groups]

    def _factors(self) -> tuple[float, float]:
        """Return what multiplies a sum's inputs and its result."""
        after = 1.0 / self._exchange.size if self._options.op == "average" else 1.0
        return 1.0 / self._options.predivide, self._options.predivide * after

    def _reduce_dense(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        if self._options.op == "adasum":
            return self._exchange.all_reduce(tensor, name=name, op="adasum")
        before, after = self._factors()
        return self._exchange.all_reduce(tensor, name=name, prescale=before, postscale=after)

    def _reduce_group(self, gradients: list[Any], group: Sequence[int], name: str) -> None:
        """Replace the members of `group` among `gradients`; one message holds one dtype."""
        before, after = self._factors()
        for dtype in dict.fromkeys(gradients[i].dtype for i in group):
            members = [i for i in group if gradients[i].dtype == dtype]
            results = self._exchange.grouped_all_reduce(
                [gradients[i] for i in members], name=f"{name}/{dtype.name}", prescale=before, postscale=after
            )
            for i, result in zip(members, results, strict=True):
                gradients[i] = result

    def _prepared(self, gradient: Gradient) -> Gradient:
        """Make sparse gradients dense where that is decided beforehand; of the others send no row twice."""
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        dense = is_small(gradient) if self._options.sparse_as_dense is None else self._options.sparse_as_dense
        if self._options.op == "adasum" and not dense:
            raise ConfigError("Adasum is not defined on sparse gradients: use sparse_as_dense=True.")
        return tf.convert_to_tensor(gradient) if dense else sum_duplicates(gradient)

    def _reduce_sparse(self, gradients: list[Any], sparse: Sequence[int], names: Sequence[str], rows: str) -> None:
        """Replace the sparse ones among `gradients`."""
        if not sparse:
            return
        slices = [gradients[i] for i in sparse]
        if self._options.sparse_as_dense is None:
            gather: Sequence[Any] = gathering_is_cheaper(slices, self._exchange, rows)
        else:
            gather = [True] * len(slices)
        for i, cheaper in zip(sparse, gather, strict=True):
            gradients[i] = self._reduce_table(gradients[i], names[i], cheaper)

    def _reduce_table(self, slices: tf.IndexedSlices, name: str, gather: bool | tf.Tensor) -> tf.IndexedSlices:
        def gathered() -> tf.IndexedSlices:
            factor = 1.0 / self._exchange.size if self._options.op == "average" else 1.0
            return scaled(gather_rows(slices, self._exchange, name), factor)

        def reduced() -> tf.IndexedSlices:
            return as_rows(self._reduce_dense(tf.convert_to_tensor(slices), f"{name}/dense"), slices)

        if not tf.is_tensor(gather):
            return gathered()
        parts = tf.cond(gather, lambda: _tensors_of(gathered()), lambda: _tensors_of(reduced()))
        return tf.IndexedSlices(*parts, slices.dense_shape)


def _tensors_of(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    return slices.values, slices.indices


def _others(items: Sequence[int], groups: Sequence[Sequence[int]]) -> list[int]:
    """Return those of `items` that are in no group."""
    grouped = {i for group in groups for i in group}
    return [i for i in items if i not in grouped]


def _split(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Cut `items` into at most `parts` runs of nearly equal length, none of them empty."""
    parts = min(parts, len(items))
    bounds = [len(items) * i // parts for i in range(parts + 1)] if parts else [0]
    return [items[a:b] for a, b in pairwise(bounds)]
