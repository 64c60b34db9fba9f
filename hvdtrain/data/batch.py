"""A replica's slice of one global batch, and the arithmetic of slicing."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError, opt


class Batch(NamedTuple):
    """One replica's slice of a global batch.

    `has_samples`, `global_samples` and `finite` are Python values where they are known before the step is compiled: the
    compiled step then computes nothing from them.
    """

    inputs: Any
    """Inputs of the model; the whole element if the data have no targets."""
    targets: Any
    """None where the data have none."""
    sample_weight: Any
    """Weights [samples], or None."""
    has_samples: tf.Tensor | float
    """1, or 0 for a replica without samples of a short batch: it holds one placeholder sample that does not count.

    1, too, where no replica has any: what a step makes of a batch without samples is left to Keras.
    """
    global_samples: tf.Tensor | int
    """Samples of the global batch."""
    finite: bool | None = None
    """True if inputs and targets are known to hold neither NaN nor infinite values; None if that was not checked."""
    nominal: bool | None = None
    """True if `global_samples` counts a full batch on every replica, which some may not have: the step then divides by
    the weights that were added up."""


Change = Callable[..., tuple[Any, ...]]
"""Maps `(inputs, targets[, sample_weight])` of any samples, row by row."""


def split_bounds(total: Any, index: int, size: int) -> tuple[Any, Any]:
    """Return begin and end of slice `index` when `total` samples are split into `size` slices.

    Slices differ by one sample at most; `total` may be an int or an integer tensor.
    """
    return total * index // size, total * (index + 1) // size


def per_replica(batch: int, size: int, *, uneven: bool = False) -> int:
    """Return the samples per replica of a global batch over `size` replicas.

    Args:
        batch: samples of the global batch.
        size: number of replicas.
        uneven: allow a batch that does not divide: some replicas then take one sample more.

    Raises:
        ConfigError: `batch` is not positive, or does not divide.
    """
    if batch < 1:
        raise ConfigError(f"A batch needs at least one sample. Received: {batch}.")
    if batch % size and not uneven:
        near = max(1, batch // size) * size
        raise ConfigError(
            f"A batch of {batch} samples does not divide among {size} ranks (batch is the global batch). "
            f"Use {opt('batch', near)} or {opt('batch', near + size)}, or another number of ranks."
        )
    return batch // size


def slice_bounds(total: int, index: int, size: int) -> tuple[int, int, float]:
    """Return begin and end of a replica's slice of a batch of `total` samples, and whether it counts.

    A replica without samples holds a neighbour's, uncounted, since layers fail on empty batches.
    """
    begin, end = split_bounds(total, index, size)
    first = min(begin, total - 1)
    return first, max(end, first + 1), float(end > begin)


def samples_in(batch: Batch) -> Any:
    """Return the tensor that has a row for each sample: of arrays that differ in length, the first target."""
    return tensors_in(batch.inputs if batch.targets is None else batch.targets)[0]


def tensors_in(nest: Any) -> list[Any]:
    """Return the tensors of a nest, without the inputs that are None."""
    return [each for each in tf.nest.flatten(nest) if each is not None]


def map_tensors(function: Callable[[Any], Any], nest: Any) -> Any:
    """Apply `function` to the tensors of a nest; optional inputs that are None stay."""
    return tf.nest.map_structure(lambda each: None if each is None else function(each), nest)


def part_of(batch: Batch, bounds: Callable[[int], tuple[int, int]]) -> Batch | None:
    """Return the samples in the `bounds` for a number of them; None if the batch's tensors differ in length.

    Two zipped datasets are cut each by itself; see `slice_batch`.
    """
    zipped = isinstance(batch.targets, tuple)

    def cut(part: Any) -> Any:
        lengths = {int(rows_of(tensor)) for tensor in tensors_in(part)}
        if len(lengths) > 1:
            raise ValueError("tensors differ in length")
        count = lengths.pop() if lengths else 0
        first, last = (tf.constant(bound, tf.int64) for bound in bounds(count))
        return map_tensors(lambda tensor: rows_between(tensor, first, last), part)

    samples = (batch.inputs, batch.targets, batch.sample_weight)
    try:
        inputs, targets, weights = map(cut, samples) if zipped else cut(samples)
    except ValueError:
        return None
    return batch._replace(inputs=inputs, targets=targets, sample_weight=weights)


def count_of(element: Any) -> int:
    """Return the samples of a global batch."""
    return int(rows_of(samples_in(as_batch(element, 1.0, 0))))


def as_batch(element: Any, has_samples: Any, total: Any, *, finite: bool | None = None) -> Batch:
    """Make a `Batch` of (inputs, targets[, sample weights]); any other element is inputs without targets."""
    pair = isinstance(element, tuple) and len(element) in (2, 3)
    inputs, targets, *weights = element if pair else (element, None)
    return Batch(
        inputs=inputs,
        targets=targets,
        sample_weight=weights[0] if weights else None,
        has_samples=has_samples,
        global_samples=total,
        finite=finite,
    )


def changed(change: Change, batch: Batch) -> Batch:
    """Return a batch of which `change` was applied to the samples."""
    fields = [each for each in (batch.inputs, batch.targets, batch.sample_weight) if each is not None]
    return as_batch(change(*fields), batch.has_samples, batch.global_samples)


def packed(elements: tuple[Any, ...]) -> Any:
    """Return arrays by field as the element that Keras makes of them: of a single array the array itself."""
    alone = len(elements) == 1 and not isinstance(elements[0], tuple | list)
    return elements[0] if alone else elements


def slice_batch(element: Any, index: int, size: int) -> Batch:
    """Take this replica's slice of a global batch: a nest of tensors [samples, …].

    Elements of two datasets that were zipped may differ in length, as labeled and unlabeled samples of one step do:
    each is split by itself, and has to divide among the replicas then. Other tensors that differ in length are not
    split: what belongs together, such as the edges and nodes of a graph, would be cut.
    """
    total = rows_of(samples_in(as_batch(element, 1.0, 0)))
    _, _, has_samples = slice_bounds_of_tensor(total, index, size)
    zipped = isinstance(element, tuple) and len(element) == 2 and isinstance(element[1], tuple)

    def cut(part: Any) -> Any:
        length = rows_of(tensors_in(part)[0])
        whole = (length == total) | ((length % size == 0) & (total % size == 0))
        return map_tensors(lambda tensor: cut_one(tensor, length, whole), part)

    def cut_one(tensor: tf.Tensor, length: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
        if size == 1:
            return tensor
        fits = whole & (rows_of(tensor) == length)
        checked = tf.debugging.Assert(fits, [_UNEQUAL, rows_of(tensor), length, total])
        with tf.control_dependencies([] if checked is None else [checked]):
            first, last, _ = slice_bounds_of_tensor(length, index, size)
            return rows_between(tensor, first, last)

    return as_batch(tuple(map(cut, element)) if zipped else cut(element), has_samples, tf.cast(total, tf.int32))


def check_division(element: Any, size: int) -> None:
    """Reject a global batch that `slice_batch` does not split. Raises DataError."""
    try:
        slice_batch(element, 0, size)
    except tf.errors.InvalidArgumentError as error:
        lengths = [int(rows_of(tensor)) for tensor in tensors_in(element)]
        raise DataError(f"{_UNEQUAL} {', '.join(map(str, lengths))}.") from error


_UNEQUAL = (
    "The tensors of a batch differ in length, and slices would cut what belongs together, such as the edges and nodes "
    "of a graph. Use drop_remainder=True where two datasets are zipped, or give each rank whole batches of its own: "
    'fit(dataset.shard(hvdtrain.size(), hvdtrain.rank()), shard="rank"), or a PyDataset whose batch n is number '
    "n * hvdtrain.size() + hvdtrain.rank(). Received lengths:"
)


def rows_of(tensor: Any) -> tf.Tensor:
    """Return the rows of a tensor, which may be ragged or sparse."""
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int64)
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int64)
    return tf.shape(tensor, out_type=tf.int64)[0]


def rows_between(tensor: Any, first: Any, last: Any) -> Any:
    """Return rows `first` to `last` - 1 of an array or a tensor, which may be ragged or sparse."""
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[first:last]
    shape = tensor.dense_shape
    begin = tf.concat([[first], tf.zeros_like(shape[1:])], 0)
    rows = tf.sparse.slice(tensor, begin, tf.concat([[last - first], shape[1:]], 0))
    return tf.sparse.SparseTensor(rows.indices, rows.values, tf.ensure_shape(rows.dense_shape, shape.shape))


def slice_bounds_of_tensor(total: tf.Tensor, index: int, size: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Like `slice_bounds`, for a `total` known only at run time."""
    begin, end = split_bounds(total, index, size)
    first = tf.minimum(begin, total - 1)
    return first, tf.maximum(end, first + 1), tf.cast((end > begin) | (total == 0), tf.float32)


def of_any_length(nest: Any) -> Any:
    """Return specs of the tensors of a nest for any number of rows; other values stay."""
    return map_tensors(_spec_of_any_length, nest)


def _spec_of_any_length(value: Any) -> Any:
    if not tf.is_tensor(value):
        return value
    shape = [None, *value.shape[1:]] if value.shape.rank else value.shape
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, value.dtype)
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, value.row_splits.dtype)
    return tf.TensorSpec(shape, value.dtype)


def specs_of_all(batch: Batch, parts: int = 1) -> Batch:
    """Return specs of the samples of all replicas, or of one of `parts` equal parts of them, none ragged or sparse."""
    mine, total = max(int(rows_of(samples_in(batch))), 1), int(batch.global_samples)  # a batch may have no samples

    def spec(tensor: Any) -> tf.TensorSpec:
        shape = tf.TensorShape(tensor.shape)
        # Of two zipped datasets each replica has equal slices, of a length of their own.
        rows = [-(-shape[0] * total // (mine * parts)), *shape[1:]] if shape.rank else shape
        return tf.TensorSpec(rows, tensor.dtype)

    fields = (batch.inputs, batch.targets, batch.sample_weight)
    inputs, targets, weights = (map_tensors(spec, each) for each in fields)
    return batch._replace(inputs=inputs, targets=targets, sample_weight=weights)
