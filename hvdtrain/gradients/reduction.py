"""The exchange of gradients: the one piece behind the tape, the training step and whatever accumulates."""

import zlib
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, cast

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.config.errors import ConfigError, in_script, opt
from hvdtrain.config.options import section, validate
from hvdtrain.config.training import CompressionName, ExchangeConfig, ReduceOpName, SparseName
from hvdtrain.gradients.compression import WireFormat, compressed_sums, is_compressible
from hvdtrain.gradients.sparse import JoinedRows, as_rows, is_small, table_bytes
from hvdtrain.runtime.packing import buffers, pack, unpack
from hvdtrain.runtime.tuning import BUFFER_BYTES

SMALL_BYTES = 2**18
PACKED_BYTES = 2**20
"""Gradients of up to SMALL_BYTES share tensors of up to PACKED_BYTES. Each tensor that is exchanged takes the processor
from the backward pass, whatever its size: a step of ResNet-20 on a core of its own took 6 ms more than without an
exchange, of 88, and 3 with all of its 65 gradients in one. Of more than that one waits long for the first of them."""
COMPRESSED_BYTES = 2**20
"""Of each replica's part of a buffer of compressed gradients, before they are converted. While a buffer is on the wire
the next is converted, and Gloo uses both directions of a link at once for short messages alone: two hosts at 1 Gbit/s
added up 100 MB in 437 ms with buffers of 2 MB, in 490 with 4, 584 with 8 and 658 with 16; the link needs 419."""

Gradient: TypeAlias = Any
"""A tf.Tensor, tf.IndexedSlices or None."""


@section
class ReductionOptions(ExchangeConfig):
    """Options of the exchange, and groups of variables by name.

    Of `compression`: other dtypes than float32 and float64, gathered rows, and what a single replica has, stay as they
    are. Compressed gradients that are in no group form one.
    """

    named_groups: tuple[tuple[str, ...], ...] = ()
    """Paths of the variables of each group; what is in none of them leaves as without groups."""

    def __post_init__(self) -> None:
        validate(self)
        paths = [path for group in self.named_groups for path in group]
        twice = next((path for path in paths if paths.count(path) > 1), None)
        if twice is not None:  # its gradient would be summed twice
            raise ConfigError(f"groups must not share a variable. Received: {twice!r} more than once.")
        if self.named_groups and self.reduce_op == "adasum":
            raise ConfigError(
                f"{opt('reduce_op', 'adasum')} reduces each whole gradient by itself: leave out "
                f"{opt('gradient_groups')}."
            )


ARGUMENTS = {
    "sparse_gradients=gather": "sparse_as_dense=False",
    "sparse_gradients": "sparse_as_dense",
    "reduce_op": "op",
    "gradient_groups": "groups",
    "predivide": "gradient_predivide_factor",
}
"""Arguments of Trainer -> what Horovod, and the tape and optimizer here, call them."""


def reduction_options(
    op: ReduceOpName = "average",
    compression: CompressionName = "none",
    groups: int | tuple[tuple[str, ...], ...] = 0,
    sparse_as_dense: bool | None = None,
    gradient_predivide_factor: float = 1.0,
) -> ReductionOptions:
    """Return the options that a script names as Horovod does.

    Raises:
        ConfigError: in the script's words, a value that is none of its option's, or options that exclude one another.
    """
    sparse: dict[bool | None, SparseName] = {None: "auto", False: "gather", True: "dense"}
    count, named = (groups, ()) if isinstance(groups, int) else (0, groups)
    try:
        return ReductionOptions(
            reduce_op=op,
            compression=compression,
            sparse_gradients=sparse[sparse_as_dense],
            gradient_groups=count,
            predivide=gradient_predivide_factor,
            named_groups=named,
        )
    except ConfigError as error:
        raise ConfigError(in_script(error.message, ARGUMENTS)) from None


def scaled(gradient: Gradient, factor: Any) -> Gradient:
    """Multiply a gradient, dense or sparse, by a scalar; None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    # tf.cast would take a Python number through float32.
    return gradient * (tf.cast(factor, gradient.dtype) if tf.is_tensor(factor) else factor)


def weighted(gradient: Gradient, weight: tf.Tensor) -> Gradient:
    """Multiply a gradient by its weight; of weight zero it is zero, also where it is not finite."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(weighted(gradient.values, weight), gradient.indices, gradient.dense_shape)
    return tf.math.multiply_no_nan(gradient, tf.cast(weight, gradient.dtype))


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
        self._reduce_sparse(reduced, sparse, paths, role)
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
        alone = _others(dense, groups)
        packs = self._packs(gradients, alone)
        for places in packs:
            name = _pack_name([paths[i] for i in places])
            members = [gradients[i] for i in places]
            _replace(gradients, places, unpack(self._reduce_dense(pack(members), f"{role}/{name}"), members))
        for i in _others(alone, packs):
            gradients[i] = self._reduce_dense(gradients[i], f"{role}/{paths[i]}")

    def _packs(self, gradients: Sequence[Any], dense: Sequence[int]) -> list[Sequence[int]]:
        """Return the places of small ones that share a tensor; those that the backward pass comes to first, first."""
        if not self._exchange.sends or self._options.reduce_op == "adasum":
            return []
        # By host, each tensor takes three exchanges.
        most, full = (SMALL_BYTES, PACKED_BYTES) if self._exchange.by_host is None else (BUFFER_BYTES, BUFFER_BYTES)
        sizes = {i: table_bytes(gradients[i]) for i in reversed(dense)}
        small = [i for i, size in sizes.items() if size is not None and size <= most]
        packs = (_buffers(gradients, members, full) for members in _by_dtype(gradients, small).values())
        return [places for several in packs for places in several if len(places) > 1]

    def _reduce_compressed(self, gradients: list[Any], dense: Sequence[int], paths: Sequence[str], role: str) -> None:
        """Replace the gradients at `dense`, those that are in no group a buffer after another."""
        groups = self._groups(dense, paths)
        for number, group in enumerate(groups):
            self._reduce_buffers(gradients, group, f"{role}/group{number}")
        for number, buffer in enumerate(_buffers(gradients, _others(dense, groups), self._most_compressed)):
            self._reduce_buffers(gradients, buffer, f"{role}/buffer{number}")

    @property
    def _most_compressed(self) -> int:
        """Bytes of a buffer of compressed gradients."""
        return COMPRESSED_BYTES * self._exchange.size

    def _reduce_buffers(self, gradients: list[Any], group: Sequence[int], name: str) -> None:
        """Replace the members of `group` by way of one compressed buffer for each dtype."""
        before, after = self._factors()
        wire = cast(WireFormat, self._options.compression)
        for dtype, members in _by_dtype(gradients, group).items():
            sums = compressed_sums(
                [gradients[i] for i in members],
                self._exchange,
                wire,
                name=f"{name}/compressed/{dtype.name}",
                prescale=before,
                postscale=after,
                most=self._most_compressed // dtype.size,
            )
            _replace(gradients, members, sums)

    def _groups(self, dense: Sequence[int], paths: Sequence[str]) -> list[Sequence[int]]:
        """Return the places of the gradients that leave together."""
        if not self._options.named_groups:
            return _split(dense, self._options.gradient_groups)
        return [[i for i in dense if paths[i] in group] for group in self._options.named_groups]

    def _factors(self) -> tuple[float, float]:
        """Return what multiplies a sum's inputs and its result."""
        after = 1.0 / self._exchange.size if self._options.reduce_op == "average" else 1.0
        return 1.0 / self._options.predivide, self._options.predivide * after

    def _reduce_dense(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        if self._options.reduce_op == "adasum":
            return self._exchange.all_reduce(tensor, name=name, op="adasum")
        before, after = self._factors()
        return self._exchange.all_reduce(tensor, name=name, prescale=before, postscale=after)

    def _reduce_group(self, gradients: list[Any], group: Sequence[int], name: str) -> None:
        """Replace the members of `group` among `gradients`."""
        before, after = self._factors()
        for dtype, members in _by_dtype(gradients, group).items():
            results = self._exchange.grouped_all_reduce(
                [gradients[i] for i in members], name=f"{name}/{dtype.name}", prescale=before, postscale=after
            )
            _replace(gradients, members, results)

    def _prepared(self, gradient: Gradient) -> Gradient:
        """Make sparse gradients dense where that is decided beforehand."""
        if not isinstance(gradient, tf.IndexedSlices):
            return None if gradient is None else tf.convert_to_tensor(gradient)
        choice = self._options.sparse_gradients
        dense = is_small(gradient) if choice == "auto" else choice == "dense"
        if self._options.reduce_op == "adasum" and not dense:
            raise ConfigError("Adasum is not defined on sparse gradients: use sparse_as_dense=True.")
        return tf.convert_to_tensor(gradient) if dense else gradient

    def _reduce_sparse(self, gradients: list[Any], sparse: Sequence[int], paths: Sequence[str], role: str) -> None:
        """Replace the sparse ones among `gradients`, of which those with rows of one kind are gathered together."""
        kinds = _by_kind(gradients, sparse)
        joined = [JoinedRows([gradients[i] for i in places]) for places in kinds]
        chosen: Sequence[tf.Tensor | None] = [None] * len(kinds)
        if sparse and self._options.sparse_gradients == "auto":
            # How many rows the others touched is not known: one small message tells for all tables.
            counts = self._exchange.all_reduce(tf.concat([each.counts() for each in joined], 0), name=f"{role}//rows")
            parts = tf.split(counts, [len(each) for each in joined])
            chosen = [each.gathering_is_cheaper(part) for each, part in zip(joined, parts, strict=True)]
        for places, rows, cheaper in zip(kinds, joined, chosen, strict=True):
            own = [paths[i] for i in places]
            gathered = self._gather(rows, f"{role}/{_pack_name(own)}", cheaper)
            if cheaper is not None:
                names = [f"{role}/{path}/dense" for path in own]
                gathered = self._reduce_others([gradients[i] for i in places], names, gathered, cheaper)
            _replace(gradients, places, gathered)

    def _gather(self, rows: JoinedRows, name: str, chosen: tf.Tensor | None) -> list[tf.IndexedSlices]:
        """Return the rows of the chosen tables that all replicas touched; all tables if None."""
        factor = 1.0 / self._exchange.size if self._options.reduce_op == "average" else 1.0
        if chosen is None:
            return rows.gather(self._exchange, name, factor=factor)
        return tf.cond(
            tf.reduce_any(chosen),
            lambda: rows.gather(self._exchange, name, factor=factor, chosen=chosen),
            rows.none,
        )

    def _reduce_others(
        self, tables: Sequence[tf.IndexedSlices], names: Sequence[str], gathered: Sequence[Any], chosen: tf.Tensor
    ) -> list[tf.IndexedSlices]:
        """Reduce the tables that are not `chosen`; return them among those that are gathered."""

        def reduced(table: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
            return as_rows(self._reduce_dense(tf.convert_to_tensor(table), name), table)

        flags = tf.unstack(chosen, num=len(tables))
        return [
            tf.cond(flag, lambda rows=rows: rows, lambda table=table, name=name: reduced(table, name))
            for flag, rows, table, name in zip(flags, gathered, tables, names, strict=True)
        ]


def _replace(gradients: list[Any], places: Sequence[int], results: Sequence[Any]) -> None:
    for i, result in zip(places, results, strict=True):
        gradients[i] = result


def _pack_name(paths: Sequence[str]) -> str:
    """Return the name of a pack, which is another one where a replica has other gradients: they must not be added."""
    if len(paths) == 1:
        return paths[0]
    return f"{paths[0]} and {len(paths) - 1} more/{zlib.crc32(repr(list(paths)).encode()):08x}"


def _by_dtype(gradients: Sequence[tf.Tensor], places: Sequence[int]) -> dict[tf.DType, list[int]]:
    """Return the places of each dtype's gradients; one message holds one dtype."""
    dtypes = dict.fromkeys(gradients[i].dtype for i in places)
    return {dtype: [i for i in places if gradients[i].dtype == dtype] for dtype in dtypes}


def _by_kind(gradients: Sequence[tf.IndexedSlices], places: Sequence[int]) -> list[list[int]]:
    """Return the places of tables whose rows have one dtype and shape; one whose shape is not known is by itself."""
    found: dict[Any, list[int]] = {}
    for i in places:
        values = gradients[i].values
        shape = values.shape[1:]
        key = (values.dtype, tuple(shape)) if shape.is_fully_defined() else i
        found.setdefault(key, []).append(i)
    return list(found.values())


def _buffers(gradients: Sequence[tf.Tensor], dense: Sequence[int], most: int) -> list[Sequence[int]]:
    """Return the places of neighbours that share a buffer."""
    return [[dense[place] for place in places] for places in buffers([gradients[i] for i in dense], most)]


def _others(items: Sequence[int], groups: Sequence[Sequence[int]]) -> list[int]:
    """Return those of `items` that are in no group."""
    grouped = {i for group in groups for i in group}
    return [i for i in items if i not in grouped]


def _split(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Cut `items` into at most `parts` runs of nearly equal length, none of them empty."""
    parts = min(parts, len(items))
    bounds = [len(items) * i // parts for i in range(parts + 1)] if parts else [0]
    return [items[a:b] for a, b in pairwise(bounds)]
