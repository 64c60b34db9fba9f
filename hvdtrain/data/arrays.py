"""Sources of arrays in memory, subsets of a source, and holding out validation samples."""

import hashlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras import gathered_rows, sliceable_rows, sparse_tensor
from hvdtrain.config.errors import ConfigError, DataError, NoSamplesError
from hvdtrain.data.batch import map_tensors, tensors_in
from hvdtrain.data.source import Source

ONE_OF = 10
"""By default, one in so many samples is held out."""
LARGE = 64 * 2**20
"""Bytes from which an array in a file stays there."""
COMPARED_ROWS = 256
"""Rows of an array in a file that its fingerprint reads."""
HOLD_OUT_SEED = 20260101
"""Fixed, not the run's seed: a resumed run must never validate on samples that it trained on."""


class ArraySource:
    """A source of arrays: inputs, targets and optional sample weights, with samples along dim 0.

    Rows of large arrays in files (`np.memmap`, h5py, zarr) are read when they are needed.

    Args:
        elements: `(inputs, targets)` or `(inputs, targets, sample_weight)`; each may be a nest of arrays. Inputs
            without targets are `(inputs,)`, or an array or dict by itself.
        name: its name in error messages.

    Raises:
        DataError: no samples, or arrays of different lengths.
    """

    def __init__(self, elements: Any, name: str = "data") -> None:
        if hasattr(elements, "shape") or isinstance(elements, dict):
            elements = (elements,)
        _refuse_loader(elements, name)
        if not isinstance(elements, tuple | list) or len(elements) not in (1, 2, 3):
            kind = type(elements).__name__
            raise DataError(
                f"{name} must be (inputs, targets), (inputs, targets, sample_weight) or, without targets, (inputs,). "
                f"Received: {f'a {kind} of {len(elements)}' if isinstance(elements, tuple | list) else kind}."
            )
        nest = nest_of(tuple(elements))
        map_tensors(lambda leaf: _refuse_loader(leaf, name), nest)
        arrays = map_tensors(_standard, nest)
        lengths = {_length(array) for array in tensors_in(arrays)}
        if len(lengths) != 1:
            raise DataError(f"The arrays of {name} differ in length: {', '.join(map(str, sorted(lengths)))} samples.")
        self.size = lengths.pop()
        if self.size == 0:
            raise NoSamplesError(f"{name} holds no samples.")
        self.name = name
        self.heavy = False
        self.finite = all(_is_finite(array) for array in tensors_in(arrays[:2]))
        """Whether inputs and targets were seen to be finite: checked once here, not in every step."""
        self.elements = tf.nest.map_structure(lambda a: tf.constant(a) if isinstance(a, np.ndarray) else a, arrays)
        self.spec = map_tensors(lambda tensor: tf.TensorSpec(tensor.shape[1:], tensor.dtype), self.elements)

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        """Return samples by number."""
        return map_tensors(lambda tensor: _gathered(tensor, numbers), self.elements)

    def part(self, samples: slice, name: str) -> "ArraySource":
        """Return consecutive samples as a source of their own."""
        numbers = tf.range(self.size, dtype=tf.int64)[samples]

        def rows(element: Any) -> Any:
            return element[samples] if isinstance(element, FileRows) else _gathered(element, numbers)

        return ArraySource(map_tensors(rows, self.elements), name)

    def describe(self, number: int) -> str:
        """Describe where a sample comes from."""
        return f"sample {number} of {self.name}"

    def fingerprint(self) -> bytes:
        """Return the SHA-256 [32 bytes] of all values, types, shapes and names; of arrays in files, of some rows."""
        kinds = map_tensors(lambda tensor: (tensor.dtype.name, *tensor.shape), self.elements)
        digest = hashlib.sha256(repr(kinds).encode())
        values = [
            each.compared if isinstance(each, SparseRows | FileRows) else each for each in tensors_in(self.elements)
        ]
        for tensor in tf.nest.flatten(values, expand_composites=True):
            if tensor.dtype == tf.string:
                digest.update(tf.io.serialize_tensor(tensor).numpy())
            else:
                digest.update(np.ascontiguousarray(tensor.numpy()).view(np.uint8).data)
        return digest.digest()


def _refuse_loader(thing: Any, name: str) -> None:
    """Refuse an iterable of batches, or an iterator: a function is called for each pass, a loader is not known to be.

    Raises:
        DataError: with the line to write.
    """
    of_arrays = (tuple, list, dict, str, bytes)
    if not hasattr(thing, "__iter__") or isinstance(thing, of_arrays) or _is_array(thing):
        return
    raise DataError(
        f"{name} must be arrays, or batches of a tf.data.Dataset, a PyDataset or a generator function. Received: "
        f"{type(thing).__name__}. Pass a function that begins anew in each pass: lambda: iter(loader), with the same "
        "batches on every rank."
    )


def _is_array(thing: Any) -> bool:
    return any(hasattr(thing, name) for name in ("shape", "dtype", "__array__", "tocsr"))


def nest_of(part: Any) -> Any:
    """Turn lists of arrays into tuples, which tf.data does not stack, and lists of numbers into arrays."""
    if isinstance(part, dict):
        return {key: nest_of(value) for key, value in part.items()}
    if isinstance(part, list) and not any(hasattr(entry, "shape") or entry is None for entry in part):
        return np.asarray(part)
    return tuple(map(nest_of, part)) if isinstance(part, list | tuple) else part


class SparseRows:
    """A SparseTensor, or SciPy's sparse matrix, of which rows can be gathered."""

    def __init__(self, matrix: Any) -> None:
        self.sparse = matrix if isinstance(matrix, tf.SparseTensor) else sparse_tensor(matrix)
        if self.sparse.dtype.is_floating:
            self.sparse = tf.cast(self.sparse, keras.config.floatx())
        self.shape, self.dtype = self.sparse.shape, self.sparse.dtype
        self._rows = sliceable_rows(self.sparse)

    @property
    def compared(self) -> tf.SparseTensor:
        """Return the arrays that a fingerprint hashes."""
        return self.sparse

    def gather(self, numbers: tf.Tensor) -> tf.SparseTensor:
        """Return rows by number."""
        return gathered_rows(self._rows, numbers)


class FileRows:
    """A large array in a file, whose pages all ranks of a host share: rows are read when they are needed."""

    def __init__(self, array: Any, begin: int = 0, end: int | None = None) -> None:
        floats = np.issubdtype(array.dtype, np.floating)
        rows = range(array.shape[0])[begin:end]
        self.shape = tf.TensorShape([len(rows), *array.shape[1:]])
        self.dtype = tf.as_dtype(keras.config.floatx() if floats else array.dtype)
        self._array = array
        self._begin, self._end = rows.start, rows.stop

    def __getitem__(self, rows: slice) -> "FileRows":
        kept = range(self._begin, self._end)[rows]
        return FileRows(self._array, kept.start, kept.stop)

    @property
    def compared(self) -> tf.Tensor:
        """Return the rows, at equal distances, that a fingerprint hashes."""
        return self.gather(tf.constant(np.linspace(0, self.shape[0] - 1, COMPARED_ROWS).astype(np.int64)))

    def gather(self, numbers: tf.Tensor) -> tf.Tensor:
        """Return rows by number."""
        rows = tf.numpy_function(self._read, [numbers], self.dtype, stateful=False)
        return tf.ensure_shape(rows, [*numbers.shape, *self.shape[1:]])

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        # h5py takes increasing numbers, each once.
        ordered, places = np.unique(self._begin + numbers, return_inverse=True)
        return np.asarray(self._array[ordered], self.dtype.as_numpy_dtype)[places]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._array[self._begin : self._end], dtype or self.dtype.as_numpy_dtype)


def _gathered(element: Any, numbers: tf.Tensor) -> Any:
    return element.gather(numbers) if isinstance(element, SparseRows | FileRows) else tf.gather(element, numbers)


def _stays_in_file(array: Any) -> bool:
    in_file = isinstance(array, np.memmap) or type(array).__module__.partition(".")[0] in ("h5py", "zarr")
    numbers = in_file and np.dtype(array.dtype).kind in "biufc"
    return numbers and int(np.prod(array.shape)) * np.dtype(array.dtype).itemsize >= LARGE


def _length(array: Any) -> int:
    if isinstance(array, np.ndarray):
        return len(array) if array.ndim else 0
    return int(array.nrows() if isinstance(array, tf.RaggedTensor) else array.shape[0])


def _standard(array: Any) -> Any:
    """Return an array; of floats in Keras' default dtype, as Keras makes them."""
    if isinstance(array, tf.RaggedTensor):
        return tf.cast(array, keras.config.floatx()) if array.dtype.is_floating else array
    if isinstance(array, SparseRows | FileRows):
        return array
    if isinstance(array, tf.SparseTensor) or hasattr(array, "tocsr"):
        return SparseRows(array)
    if _stays_in_file(array):
        return FileRows(array)
    found = np.asarray(array)
    if np.issubdtype(found.dtype, np.floating) and found.dtype != keras.config.floatx():
        return found.astype(keras.config.floatx())
    return found


def _is_finite(array: Any) -> bool:
    """Return whether `array` is certainly finite; False if its sum overflows, since one cheap pass cannot tell."""
    if not isinstance(array, np.ndarray):
        return False
    return not np.issubdtype(array.dtype, np.inexact) or bool(np.isfinite(array.sum(dtype=np.float64)))


class Subset:
    """The samples `numbers` of `source`, in that order.

    Raises:
        DataError: `numbers` is empty.
    """

    def __init__(self, source: Source, numbers: np.ndarray, name: str) -> None:
        if not len(numbers):
            raise DataError(f"{name} holds no samples.")
        self.name = name
        self.size = len(numbers)
        self.spec = source.spec
        self.finite = source.finite
        self.heavy = source.heavy
        self._source = source
        self._numbers = np.asarray(numbers, np.int64)
        whole = getattr(source, "file_of", None)
        self.file_of = None if whole is None else whole[self._numbers]
        """[samples] the number of each sample's file, where they are in files."""

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        """Return samples by number."""
        return self._source.gather(tf.gather(self._numbers, numbers))

    def describe(self, number: int) -> str:
        """Describe where a sample comes from."""
        return self._source.describe(int(self._numbers[number]))

    def fingerprint(self) -> bytes:
        """Return a hash of the source's fingerprint and of the numbers."""
        return hashlib.sha256(self._source.fingerprint() + self._numbers.tobytes()).digest()

    def version(self) -> bytes:
        """Return the version of the source's files; empty if it has none."""
        return self._source.version() if hasattr(self._source, "version") else b""


def hold_out(source: Source, count: int, labels: np.ndarray | None = None) -> tuple[Subset, Subset]:
    """Split `source` into training and validation samples, deterministically.

    Args:
        source: the samples to split.
        count: samples for validation; 0: one in ten.
        labels: [samples] labels to stratify by; None: no stratification.

    Raises:
        DataError: one of the two would be empty.
    """
    train, held = held_out_numbers(source.size, count, labels, source.name)
    return Subset(source, train, f"{source.name} (training)"), Subset(source, held, f"{source.name} (validation)")


def held_out_numbers(size: int, count: int, labels: np.ndarray | None, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Split the sample numbers below `size` into training and validation, as `hold_out` does."""
    count = count or max(1, size // ONE_OF)
    if not 0 < count < size:
        raise DataError(
            f"Of the {size} samples of {name}, {count} cannot be held out for validation. See --data-args validation."
        )
    order = np.random.default_rng(HOLD_OUT_SEED).permutation(size)
    if labels is not None:
        # Every prefix is stratified by label, within one sample.
        mixed = np.asarray(labels)[order]
        rank = np.empty(size)
        for label in np.unique(mixed):
            mine = np.flatnonzero(mixed == label)
            rank[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
        order = order[np.argsort(rank, kind="stable")]
    held = np.sort(order[:count])
    return np.setdiff1d(np.arange(size), held), held


def given_or_held_out(
    train: Source, held: Source | None, validation: int, labels: np.ndarray | None = None
) -> tuple[Source, Source]:
    """Return training and validation samples.

    Args:
        train: the training samples.
        held: the validation samples; None: hold out `validation` of `train`.
        validation: samples to hold out; 0: one in ten.
        labels: see `hold_out`.

    Raises:
        ConfigError: both `validation` and `held`.
        DataError: training and validation samples of different shapes.
    """
    if held is None:
        return hold_out(train, validation, labels)
    if validation:
        raise ConfigError(f"{held.name} has samples for validation: leave out --data-args validation.")
    kinds = [
        tf.nest.map_structure(lambda spec: f"{spec.dtype.name} {list(spec.shape)}", source.spec[:2])
        for source in (train, held)
    ]
    if repr(kinds[0]) != repr(kinds[1]):
        raise DataError(
            f"The samples of {train.name} are {kinds[0]}; those of {held.name} are {kinds[1]}: both must be alike."
        )
    return train, held


def array_parts(
    elements: tuple[Any, ...], held_out: tuple[Any, ...] | None, *, validation: int, name: str
) -> tuple[ArraySource, ArraySource]:
    """Return training and validation samples of arrays, as `given_or_held_out` does; stratified by label."""
    labels = elements[1] if is_labels(elements[1]) else None
    whole = ArraySource(elements, name if held_out is None else f"{name} (training)")
    held = None if held_out is None else ArraySource(held_out, f"{name} (validation)")
    train, held = (
        part if isinstance(part, ArraySource) else ArraySource(part.gather(tf.range(part.size)), part.name)
        for part in given_or_held_out(whole, held, validation, labels)
    )
    return train, held


def is_labels(targets: Any) -> bool:
    """Return whether targets are integer labels [samples]."""
    return isinstance(targets, np.ndarray) and targets.ndim == 1 and np.issubdtype(targets.dtype, np.integer)


def check_range(labels: np.ndarray, classes: int, describe: Callable[[int], str]) -> None:
    """Refuse labels [samples, …] outside [0, classes).

    Raises:
        DataError: names the first such label, and its sample by `describe`.
    """
    wrong = np.argwhere((labels < 0) | (labels >= classes))
    if len(wrong):
        first = tuple(wrong[0])
        raise DataError(
            f"{describe(int(first[0]))}: the label {labels[first]} is not one of {classes} classes, which count from 0."
        )
