"""The tensors of one traced step, and the conversions between the ways in which a rank holds them.

A conversion changes no true value, so its gradient is the identity: tapes need not know of ranks.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.tensorflow import graph_of, in_graph_of, recorded
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.partition.kinds import OPAQUE, Kind, Opaque, Part, Per, Reduction, Rows, Sizes, Slice
from hvdtrain.runtime.compiled import numbered
from hvdtrain.runtime.guarded import guarded
from hvdtrain.runtime.users_frames import is_users, users_line


class Fetch(NamedTuple):
    """A conversion that other ranks take part in."""

    cause: str
    """Type of the operation that needs it, or what else does."""
    shape: tf.TensorShape
    """Of what this rank sends."""
    dtype: tf.DType
    gathers: bool
    """Whether rows are gathered, rather than parts reduced."""
    line: str
    """Line of the user's code, `file:number`."""


class Partition:
    """How this rank holds the tensors of a step, while it is traced.

    Args:
        collectives: the ranks with different samples.
        rows: number of this rank's samples, a scalar int32 tensor that is not folded.
        begin: number of samples on the ranks before this one, likewise.
        total: number of samples of the batch, an int or a tensor.
        first: 1.0 on the first rank and 0.0 on the others: a tensor that is not folded, since constants would let
            TensorFlow prune collectives on some ranks alone.
    """

    def __init__(
        self, collectives: Collectives, *, rows: tf.Tensor, begin: tf.Tensor, total: tf.Tensor | int, first: tf.Tensor
    ) -> None:
        self.collectives = collectives
        self.count = rows
        self.begin = begin
        self.total = total
        # In shapes TensorFlow must not know it: it would take it for the length of what has this rank's rows.
        self._open_total = total if tf.is_tensor(total) else guarded(tf.constant(total))
        self._first = first
        self.fetches: list[Fetch] = []
        self.cause = ""
        """What conversions are for, in `fetches`."""
        self.unknown = ""
        """Line of the user's code that read an unknown number of rows, last."""
        self._kinds: dict[int, tuple[Any, Kind]] = {}
        self._converted: dict[tuple[int, str, int], tuple[tf.Tensor, tf.Tensor]] = {}
        """By the identity of a tensor, which is kept for that."""
        self._thread = threading.get_ident()
        self._plain = 0
        self._graph = tf.compat.v1.get_default_graph()

    # Kinds

    def kind(self, tensor: Any) -> Kind:
        """Return how this rank holds a tensor; None: whole."""
        known = self._kinds.get(id(tensor))
        return None if known is None else known[1]

    def mark(self, tensor: Any, kind: Kind) -> Any:
        """Note how this rank holds a tensor, and return it."""
        if kind is None:
            self._kinds.pop(id(tensor), None)
        else:
            self._kinds[id(tensor)] = tensor, kind
        return tensor

    def mark_rows(self, nest: Any) -> Any:
        """Mark the tensors of a nest as rows of this rank's samples."""
        for tensor in tf.nest.flatten(nest, expand_composites=True):
            if tf.is_tensor(tensor):
                self.mark(tensor, Rows())
        return nest

    def knows(self, tensors: Sequence[Any]) -> bool:
        """Return whether this rank holds any of the tensors in another way than whole."""
        return any(id(tensor) in self._kinds for tensor in tensors)

    @property
    def is_plain(self) -> bool:
        """Whether operations are made without a look at them now, or in another thread."""
        return self._plain > 0 or threading.get_ident() != self._thread

    @property
    def is_outside(self) -> bool:
        """Whether operations are made in the step itself now, and not in a branch, loop or function of it."""
        return tf.compat.v1.get_default_graph() is self._graph

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Make operations without a look at them, inside the context."""
        self._plain += 1
        try:
            yield
        finally:
            self._plain -= 1

    def read_shape(self, tensor: tf.Tensor, shape: tf.TensorShape, frame: Any) -> tf.TensorShape:
        """Return the shape that a frame reads of a tensor: the user's that of the whole batch, if it is known."""
        kind = self.kind(tensor)
        if not isinstance(kind, Rows) or shape.rank is None or not is_users(frame):
            return shape
        length = self.length(kind.per)
        if isinstance(length, int):
            return tf.TensorShape([length if dim == kind.dim else size for dim, size in enumerate(shape)])
        self.unknown = users_line()
        return shape

    # Conversions

    def forget_conversions(self) -> None:
        """Convert anew from here on, where a tape begins that has not recorded what was converted before."""
        self._converted.clear()

    def whole(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the true value, the same on all ranks."""
        kind = self.kind(tensor)
        if isinstance(kind, Sizes):
            return self._of_batch(tensor, kind) if kind.local else tensor
        if kind is None:
            return tensor
        if isinstance(kind, Opaque):
            raise ConfigError(
                f"{self.cause} takes something from inside of a layer that is computed as a whole. Received: "
                f"{tensor.name}. Use the layer's outputs."
            )
        if isinstance(kind, Slice):
            raise ConfigError(
                f"{opt('zero', 3)} gives each rank a slice of each gradient, where {self.cause} needs the whole "
                f"({users_line()}). Use {opt('zero', 2)}, or clip_norm and clip_value of Trainer."
            )
        if isinstance(kind, Part):
            return self._reduced(tensor, kind)
        return self._kept(tensor, "whole", lambda: self._gathered(tensor, kind))

    def has_whole(self, tensor: tf.Tensor) -> bool:
        """Return whether the true value is here already."""
        return self.kind(tensor) is None or self._key(tensor, "whole") in self._converted

    def rows(self, tensor: tf.Tensor, like: Rows) -> tf.Tensor:
        """Return this rank's rows of a tensor, laid out as `like`."""
        kind = self.kind(tensor)
        if isinstance(kind, Rows) and kind.dim == like.dim and kind.aligned(like):
            return tensor
        value = self.whole(tensor)
        name = f"rows {like.dim} {[each if isinstance(each, int) else id(each) for each in like.per]}"
        return self._kept(
            value,
            name,
            lambda: self._convert(value, lambda: self.cut(value, like), like, lambda gradient: gradient),
        )

    def part(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return this rank's part of a sum over the ranks: of a whole tensor, the first rank has it."""
        kind = self.kind(tensor)
        if isinstance(kind, Part) and kind.reduction == "sum":
            return tensor
        if isinstance(kind, Part) and kind.reduction == "mean":
            return self._kept(
                tensor,
                "part",
                lambda: self._convert(
                    tensor, lambda: _times(tensor, self.share(tensor.dtype)), Part(), lambda gradient: gradient
                ),
            )
        value = self.whole(tensor)
        return self._kept(
            value,
            "part",
            lambda: self._convert(
                value, lambda: _times(value, tf.cast(self._first, value.dtype)), Part(), lambda gradient: gradient
            ),
        )

    def opened(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return this rank's rows as the input of a unit."""
        like = self.kind(tensor)

        def back(gradient: tf.Tensor) -> tf.Tensor:
            is_inside = isinstance(like, Rows) and isinstance(self.kind(gradient), Opaque)
            return self.closed(gradient, like) if is_inside else gradient  # type: ignore[arg-type]

        return self._convert(tensor, lambda: tf.identity(tensor), OPAQUE, back)

    def closed(self, tensor: tf.Tensor, like: Rows) -> tf.Tensor:
        """Return an output of a unit as this rank's rows."""
        return self._convert(
            tensor, lambda: tf.identity(tensor), like, lambda gradient: self.opened(self.rows(gradient, like))
        )

    def zero_of_none(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a part of a sum over this rank's rows, which is zero if there are none."""
        return self._convert(
            tensor, lambda: tf.where(self.count > 0, tensor, tf.zeros_like(tensor)), Part(), lambda gradient: gradient
        )

    def share(self, dtype: tf.DType) -> tf.Tensor:
        """Return this rank's part of the samples."""
        with self.plain():
            return tf.cast(tf.cast(self.count, tf.float64) / tf.cast(self.total, tf.float64), dtype)

    def length(self, per: Sequence[Per]) -> Any:
        """Return the rows in the whole batch, an int where it is known."""
        with self.plain():
            return self.total * _sum(per)

    def local_length(self, per: Sequence[Per]) -> tf.Tensor:
        """Return this rank's rows."""
        with self.plain():
            return self.count * _sum(per)

    def local_shape(self, shape: tf.Tensor) -> tf.Tensor:
        """Return a shape with this rank's rows in the place of those of the batch."""
        kind = self.kind(shape)
        if not isinstance(kind, Sizes) or not kind.counts or kind.local:
            return shape
        return self.local_sizes(spelled(shape, kind), kind)

    def local_sizes(self, entries: Sequence[Any], kind: Sizes) -> tf.Tensor:
        """Return a vector of `kind`, but with this rank's rows; its other entries are given."""
        with self.plain():
            entries = list(entries)
            dtype = next((each.dtype for each in entries if isinstance(each, tf.Tensor)), tf.int32)
            for index in kind.counts:
                entries[index] = tf.cast(self.local_length(kind.entries[index].per), dtype)  # type: ignore[union-attr]
            value = tf.stack(entries)
        return self.mark(value, replace(kind, local=True))

    def _of_batch(self, tensor: tf.Tensor, kind: Sizes) -> tf.Tensor:
        """Return sizes with the rows of the whole batch in the place of this rank's."""
        with self.plain():
            entries = spelled(tensor, kind)
            for index in kind.counts:
                rows = self._open_total * _sum(kind.entries[index].per)  # type: ignore[union-attr]
                entries[index] = tf.cast(rows, tensor.dtype)
            value = tf.stack(entries)
        return self.mark(value, replace(kind, local=False))

    def true_shape(self, tensor: tf.Tensor, kind: Rows, dtype: tf.DType) -> tf.Tensor:
        """Return the shape of the true value."""
        with self.plain():
            local = tf.shape(tensor, out_type=dtype)
            entries = [
                local[dim] if size is None else tf.constant(size, dtype) for dim, size in enumerate(tensor.shape)
            ]
            entries[kind.dim] = tf.cast(self._open_total * _sum(kind.per), dtype)
            return tf.stack(entries)

    def cut(self, value: tf.Tensor, like: Rows) -> tf.Tensor:
        """Return this rank's rows of a whole value, without a gradient."""
        with self.plain():
            offset: Any = 0
            parts = []
            for per in like.per:
                parts.append(_slice(value, like.dim, offset + self.begin * per, self.count * per))
                offset = offset + self.total * per
            mine = parts[0] if len(parts) == 1 else tf.concat(parts, like.dim)
            # TensorFlow loses the other dims, by which gradients of what is broadcast are found.
            mine.set_shape([None if dim == like.dim else size for dim, size in enumerate(value.shape)])
            return mine

    def _gathered(self, tensor: tf.Tensor, kind: Rows) -> tf.Tensor:
        def gather() -> tf.Tensor:
            self._note(tensor, gathers=True)
            if tensor.dtype in (tf.string, tf.variant, tf.resource):
                raise ConfigError(
                    f"{self.cause} needs the samples of all ranks, and {tensor.dtype.name} cannot be exchanged. "
                    "Compute it before the step, such as in the dataset's map()."
                )
            wire, back = _wire_of(tensor.dtype)
            rank = tensor.shape.rank
            order = [kind.dim, *(dim for dim in range(rank) if dim != kind.dim)]
            local = wire(tensor) if kind.dim == 0 else tf.transpose(wire(tensor), order)
            parts = [local]
            if len(kind.per) > 1:
                parts = tf.split(local, tf.stack([self.count * per for per in kind.per]), num=len(kind.per))
            found = [self.collectives.all_gather(each, name=numbered(f"whole_batch/{self.cause}")) for each in parts]
            value = found[0] if len(found) == 1 else tf.concat(found, 0)
            value = back(value if kind.dim == 0 else tf.transpose(value, [order.index(dim) for dim in range(rank)]))
            length = self.length(kind.per)
            static = tensor.shape.as_list()
            static[kind.dim] = length if isinstance(length, int) else None
            return tf.ensure_shape(value, static)

        return self._convert(tensor, gather, None, lambda gradient: self.rows(gradient, kind))

    def _reduced(self, tensor: tf.Tensor, kind: Part) -> tf.Tensor:
        if kind.reduction == "mean":
            part = self.part(tensor)
            return self._kept(tensor, "whole", lambda: self._reduced(part, Part()))
        return self._kept(
            tensor,
            "whole",
            lambda: self._convert(
                tensor, lambda: self._all_reduced(tensor, kind.reduction), None, lambda gradient: gradient
            ),
        )

    def _all_reduced(self, tensor: tf.Tensor, reduction: Reduction) -> tf.Tensor:
        self._note(tensor, gathers=False)
        is_bool = tensor.dtype == tf.bool
        value = tf.cast(tensor, tf.uint8) if is_bool else tensor
        value = self.collectives.all_reduce(
            value,
            name=numbered(f"whole_batch/{self.cause}"),
            op=reduction,  # type: ignore[arg-type]
        )
        value = tf.ensure_shape(value, tensor.shape)
        return tf.cast(value, tf.bool) if is_bool else value

    def _convert(
        self,
        tensor: tf.Tensor,
        forward: Callable[[], tf.Tensor],
        to: Kind,
        back: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.Tensor:
        # In the tensor's own graph, also where a branch or a loop inside of it needs the value.
        with in_graph_of(tensor), self.plain():
            value = recorded(forward, tensor, back)
        return self.mark(value, to)

    def _kept(self, tensor: tf.Tensor, name: str, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Convert once."""
        key = self._key(tensor, name)
        if key not in self._converted:
            self._converted[key] = tensor, make()
        return self._converted[key][1]

    def _key(self, tensor: tf.Tensor, name: str) -> tuple[int, str, int]:
        return id(tensor), name, id(graph_of(tensor))

    def _note(self, tensor: tf.Tensor, *, gathers: bool) -> None:
        self.fetches.append(Fetch(self.cause, tensor.shape, tensor.dtype, gathers=gathers, line=users_line()))


def spelled(vector: tf.Tensor, known: Sizes) -> list[tf.Tensor]:
    """Return the entries of a vector, those that are known as constants, by which TensorFlow infers shapes."""
    return [
        tf.constant(entry, vector.dtype) if isinstance(entry, int) else vector[index]
        for index, entry in enumerate(known.entries)
    ]


def unfolded(first: bool) -> tf.Tensor:
    """Return 1.0 or 0.0 as a tensor that is not folded in the graph that is being traced."""
    return guarded(tf.constant(float(first)))


def _times(tensor: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Return the product, zero where the factor is, also for infinite values."""
    if tensor.dtype.is_floating or tensor.dtype.is_complex:
        return tf.math.multiply_no_nan(tensor, factor)
    if tensor.dtype == tf.bool:
        return tf.logical_and(tensor, tf.cast(factor, tf.bool))
    return tensor * factor


def _slice(value: tf.Tensor, dim: int, first: Any, rows: Any) -> tf.Tensor:
    """Return some rows; an error at run time where there are fewer."""
    rank = value.shape.rank
    return tf.slice(
        value,
        [first if each == dim else 0 for each in range(rank)],
        [rows if each == dim else -1 for each in range(rank)],
    )


def _sum(per: Sequence[Per]) -> Any:
    return per[0] if len(per) == 1 else sum(per[1:], per[0])


def _wire_of(dtype: tf.DType) -> tuple[Callable[[tf.Tensor], tf.Tensor], Callable[[tf.Tensor], tf.Tensor]]:
    """Return the conversions to and from what is exchanged."""
    if dtype == tf.bool:
        return lambda t: tf.cast(t, tf.uint8), lambda t: tf.cast(t, tf.bool)
    if dtype.is_complex:
        half = dtype.real_dtype
        return (
            lambda t: tf.stack([tf.math.real(t), tf.math.imag(t)], -1),
            lambda t: tf.complex(tf.cast(t[..., 0], half), tf.cast(t[..., 1], half)),
        )
    return lambda t: t, lambda t: t


IN_GRAPH = "hvdtrain/partition"
"""The collection of a graph that holds the partition of the step that it is traced for."""


def partition_here() -> Partition | None:
    """Return the partition of the step that is being traced for the whole batch, if one is."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        for partition in graph.get_collection(IN_GRAPH):
            return None if partition.is_plain else partition
        graph = getattr(graph, "outer_graph", None)
    return None


@contextmanager
def unseen() -> Iterator[None]:
    """Make operations without a look at them, inside the context, if a step is being traced for the whole batch."""
    partition = partition_here()
    with nullcontext() if partition is None else partition.plain():
        yield
