"""A user's tf.data.Dataset of global batches, sharded at its source: each rank maps only the samples that it trains on.

Which samples form a global batch, and their order, stay what the dataset says: `source.map(decode).batch(n)` becomes
windows of n elements of the source, the rank's rows of each window, `decode`, and batches of these rows. For that the
maps move behind what decides the order: `source.map(decode).shuffle(n, seed).repeat()` gives the same elements as
`source.shuffle(n, seed).repeat().map(decode)` if `decode` depends on nothing but its element, since the order of
shuffle, repeat, take and skip does not depend on what the elements are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.compat.tensorflow import (
    BATCHES,
    MAPS,
    ORDERS,
    PASSING,
    ZIPS,
    batch_of,
    function_of_map,
    input_of,
    inputs_of,
    is_kind,
    is_stateful_op,
    ops_of_map,
    reordered,
    zipped_nest,
)
from hvdtrain.data.batch import Batch, as_batch, slice_bounds_of_tensor
from hvdtrain.data.pipeline import no_autograph
from hvdtrain.runtime.logs import warn_on_first

Function = Callable[[Any], Any]
"""Takes an element as one argument, a nest, and returns another."""

HARMLESS = frozenset({"Assert", "If", "While", "StatefulPartitionedCall"})
"""Stateful ops that do not make a function depend on anything but its arguments; called functions are looked at too."""


@dataclass(frozen=True)
class Deferred:
    """A dataset as elements in their order, and the functions that are to be applied to each."""

    elements: tf.data.Dataset
    functions: tuple[Function, ...] = ()

    def __call__(self, element: Any) -> Any:
        """Apply the deferred functions to one of `elements`."""
        for function in self.functions:
            element = function(element)
        return element


Rebase = Callable[[tf.data.Dataset], tf.data.Dataset]


def deferred(dataset: tf.data.Dataset, base: Rebase = lambda found: found) -> Deferred:
    """Take the maps off `dataset` that can come last.

    Args:
        dataset: any dataset.
        base: replaces the innermost dataset, below all maps; by default it stays.
    """
    if is_kind(dataset, ZIPS):
        return _deferred_zip(dataset, base)
    if is_kind(dataset, MAPS) and is_pure(dataset):
        inner = deferred(input_of(dataset), base)
        return Deferred(inner.elements, (*inner.functions, function_of_map(dataset)))
    if is_kind(dataset, PASSING | ORDERS):
        inner = deferred(input_of(dataset), base)
        # Left as it is where nothing is to be moved: a shuffle made anew would begin with its first order again.
        if inner.functions:
            return Deferred(reordered(dataset, inner.elements), inner.functions)
    return Deferred(base(dataset))


def in_place(dataset: tf.data.Dataset, base: Rebase) -> tf.data.Dataset:
    """Rebuild `dataset` on another innermost dataset, with its maps in place."""
    if not deferred(dataset).functions:
        return base(dataset)
    if is_kind(dataset, ZIPS):
        parts = [in_place(part, base) for part in inputs_of(dataset)]
        return tf.data.Dataset.zip(tf.nest.pack_sequence_as(zipped_nest(dataset), parts))
    inner = in_place(input_of(dataset), base)
    return mapped(inner, function_of_map(dataset)) if is_kind(dataset, MAPS) else reordered(dataset, inner)


def _deferred_zip(dataset: tf.data.Dataset, base: Rebase) -> Deferred:
    parts = [deferred(part) for part in inputs_of(dataset)]
    if not any(part.functions for part in parts):
        return Deferred(base(dataset))
    parts = [deferred(part, base) for part in inputs_of(dataset)]
    zipped = tf.data.Dataset.zip(tf.nest.pack_sequence_as(zipped_nest(dataset), [part.elements for part in parts]))

    applied = tf.nest.pack_sequence_as(zipped_nest(dataset), parts)

    def each(element: Any) -> Any:
        return keras.tree.map_structure_up_to(applied, lambda part, value: part(value), applied, element)

    return Deferred(zipped, (each,))


def mapped(dataset: tf.data.Dataset, function: Function) -> tf.data.Dataset:
    """Return `dataset` with `function` applied to each element, in parallel and in order."""

    def on_arguments(*parts: Any) -> Any:
        # A NamedTuple comes whole.
        return function(parts if type(dataset.element_spec) is tuple else parts[0])

    call = tf.autograph.experimental.do_not_convert(on_arguments)
    return dataset.map(call, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def is_pure(dataset: tf.data.Dataset) -> bool:
    """Return whether a map depends on its arguments alone: no random numbers, no Python, no other state."""
    return not any(is_stateful_op(op) for op in ops_of_map(dataset) - HARMLESS)


@dataclass(frozen=True)
class Shard:
    """The rows of each global batch that a replica takes."""

    batch: int
    """Samples of a full global batch."""
    index: int
    size: int
    even: bool = False
    """Whether all replicas take as many rows of a short batch, some of them twice; else each is taken once."""

    def bounds(self, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return begin and end of the rows in a batch of `total` (modulo `total`), and whether they count."""
        if not self.even:
            return slice_bounds_of_tensor(total, self.index, self.size)
        rows = (total + self.size - 1) // self.size
        return rows * self.index, rows * (self.index + 1), tf.constant(1.0)

    def cut(self, elements: Any) -> Any:
        """Return the rows of a global batch, a nest of tensors."""
        total = _length(elements)
        first, last, _ = self.bounds(total)
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, tf.range(first, last) % total), elements)


class ShardedDataset:
    """A dataset of global batches whose samples are mapped on one replica only.

    Args:
        dataset: elements `(inputs, targets[, sample_weight])`, batched.
        batch: the dataset that forms the batches.
        above: datasets above `batch` that change the order of the batches only, from the outside in.
        samples: the elements below `batch`.
    """

    def __init__(
        self, dataset: tf.data.Dataset, batch: tf.data.Dataset, above: list[tf.data.Dataset], samples: Deferred
    ) -> None:
        self._dataset = dataset
        self._batch = batch
        self._above = above
        self._samples = samples
        self.batch, self._drop = batch_of(batch)
        self._made: dict[Shard, tf.data.Dataset] = {}

    def slices(self, index: int, size: int) -> tf.data.Dataset:
        """Return replica `index`'s slices of the batches, as `Batch`es."""
        return self.parts(index, size).map(no_autograph(_as_batch))

    def parts(self, index: int, size: int, *, even: bool = False) -> tf.data.Dataset:
        """Return the rows of replica `index`, whether they count, and the samples of each global batch."""
        shard = Shard(self.batch, index, size, even)
        if shard not in self._made:
            batches = self._rows(self._samples, shard, drop=self._drop)
            for dataset in reversed(self._above):
                batches = reordered(dataset, batches)
            self._made[shard] = batches.with_options(self._dataset.options())
        return self._made[shard]

    def compare(self, index: int, size: int) -> tuple[Any, bool]:
        """Compare a slice with that of the whole dataset, on a few elements of its source.

        Returns:
            A global batch of these elements, None if there are none; and whether the slice is a part of it.
        """
        cached: dict[int, tf.data.Dataset] = {}

        def few(base: tf.data.Dataset) -> tf.data.Dataset:
            # Read once for both sides, as a shuffle gives another order to each reader.
            if id(base) not in cached:
                cached[id(base)] = base.take(self.batch).cache()
                cached[id(base)].reduce(0, lambda count, *_: count + 1)  # a cache holds what was read to its end
            return cached[id(base)]

        below = input_of(self._batch)
        whole = in_place(below, few).batch(self.batch).take(1)
        shard = Shard(self.batch, index, size)
        mine = self._rows(deferred(below, few), shard).take(1)
        for elements, (rows, _, _) in zip(whole, mine, strict=True):
            return elements, _equal(shard.cut(elements), rows)
        return None, True

    def count(self) -> int:
        """Return the number of batches, without mapping a sample."""
        windows = self._samples.elements.map(lambda *_: 0).batch(self.batch, drop_remainder=self._drop)
        for dataset in reversed(self._above):
            windows = reordered(dataset, windows)
        return int(windows.reduce(tf.constant(0, tf.int64), lambda total, _: total + 1))

    def _rows(self, samples: Deferred, shard: Shard, *, drop: bool = False) -> tf.data.Dataset:
        is_tuple = type(samples.elements.element_spec) is tuple
        if shard.size == 1:
            whole = mapped(samples.elements, samples).batch(shard.batch, drop_remainder=drop)
            return mapped(whole, lambda elements: (elements, tf.constant(1.0), _length(elements)))
        windows = samples.elements.window(shard.batch, drop_remainder=drop)
        rows = windows.flat_map(
            no_autograph(lambda *window: _rows(window if is_tuple else window[0], shard, is_tuple=is_tuple))
        )
        rows = mapped(rows, lambda row: (samples(row[0]), *row[1:]))
        # Every window but the last gives as many rows: a batch holds the rows of one window.
        batches = rows.batch(shard.batch // shard.size)
        return batches.map(no_autograph(lambda elements, counts, totals: (elements, counts[0], totals[0])))


def sharded(dataset: tf.data.Dataset, size: int, *, owner: tf.data.Dataset | None = None) -> ShardedDataset | None:
    """Return `dataset` sharded at its source among `size` replicas; None if that is impossible, or gains nothing.

    Possible if the last transformations before `batch` are maps that depend on their element alone (no random numbers
    except stateless ones, no Python except `numpy_function(stateful=False)`), with shuffle, repeat, take, skip,
    prefetch and zip between them; after `batch` only the order of the batches may change.

    Args:
        dataset: global batches.
        size: number of replicas.
        owner: the user's dataset, by default `dataset`. It caches the result, so that a later training continues with
            the next order of its shuffles, as it would with the dataset itself.
    """
    known = vars(dataset if owner is None else owner).setdefault("_hvdtrain_sharded", {})
    above = []
    batch = dataset
    while is_kind(batch, PASSING | ORDERS):
        above.append(batch)
        batch = input_of(batch)
    if not is_kind(batch, BATCHES) or batch_of(batch)[0] % size:
        return None
    key = (*batch_of(batch), size)
    if key not in known:
        samples = deferred(input_of(batch))
        known[key] = ShardedDataset(dataset, batch, above, samples) if samples.functions else None
    found: ShardedDataset | None = known[key]
    return found


def first_and_shards(
    dataset: tf.data.Dataset, index: int, size: int, *, owner: tf.data.Dataset
) -> tuple[Any, ShardedDataset | None]:
    """Return the first global batch of `dataset`, None if it is empty, and the dataset sharded where that is possible.

    Args:
        dataset: global batches.
        index: the replica that reads, among `size`.
        size: number of replicas.
        owner: see `sharded`.
    """
    shards = sharded(dataset, size, owner=owner)
    if shards is not None:
        try:
            first, alike = shards.compare(index, size)
        except tf.errors.OpError:
            shards = None  # the whole dataset says which sample cannot be read
        else:
            if alike:
                return first, shards
            warn_on_first(
                "The maps of the dataset give other samples when they are called again: every rank calls them for all "
                "samples, and not for its own only.",
                stacklevel=3,
            )
    return next(iter(dataset.take(1)), None), None


def batch_size_of(dataset: tf.data.Dataset) -> int | None:
    """Return the samples of a full batch of `dataset`, None where that cannot be seen."""
    while is_kind(dataset, PASSING | ORDERS | MAPS):
        dataset = input_of(dataset)
    return batch_of(dataset)[0] if is_kind(dataset, BATCHES) else None


def length_of(dataset: tf.data.Dataset) -> int | None:
    """Return the number of elements; None if it is unknown or infinite."""
    count = int(dataset.cardinality())
    return None if count in (tf.data.UNKNOWN_CARDINALITY, tf.data.INFINITE_CARDINALITY) else count


def _rows(window: Any, shard: Shard, *, is_tuple: bool) -> tf.data.Dataset:
    """Return a replica's rows of a window (a nest of datasets), each with `has_samples` and `global_samples`."""
    rows = window if isinstance(window, tf.data.Dataset) else tf.data.Dataset.zip(window)
    total = rows.cardinality()
    first, last, has_samples = shard.bounds(total)
    kept = (rows.repeat() if shard.even else rows).skip(first).take(last - first)
    return kept.map(no_autograph(lambda *row: (row if is_tuple else row[0], has_samples, total)))


def _as_batch(elements: Any, has_samples: tf.Tensor, total: tf.Tensor) -> Batch:
    return as_batch(elements, has_samples, tf.cast(total, tf.int32))


def _length(elements: Any) -> tf.Tensor:
    return tf.shape(tf.nest.flatten(elements)[0], out_type=tf.int64)[0]


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)
    return all(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind in "fc") for a, b in pairs)
