"""Samples held in memory."""

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError, NoSamplesError


class ArraySource:
    """A source of arrays: inputs, targets and optional sample weights, with samples along dim 0; see `Source`.

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
        if not isinstance(elements, tuple | list) or len(elements) not in (1, 2, 3):
            raise DataError(
                f"{name} must be (inputs, targets), (inputs, targets, sample_weight) or, without targets, (inputs,). "
                f"Received: {_described(elements)}."
            )
        parts = tuple(np.asarray(part) if _is_list_of_numbers(part) else part for part in elements)
        arrays = _without_lists(tf.nest.map_structure(np.asarray, parts))
        lengths = {len(array) if array.ndim else 0 for array in tf.nest.flatten(arrays)}
        if len(lengths) != 1:
            raise DataError(f"The arrays of {name} differ in length: {', '.join(map(str, sorted(lengths)))} samples.")
        self.size = lengths.pop()
        if self.size == 0:
            raise NoSamplesError(f"{name} holds no samples.")
        self.name = name
        self.heavy = False
        self.finite = all(_is_finite(array) for array in tf.nest.flatten(arrays[:2]))
        """Whether inputs and targets were seen to be finite: looked at once here, not in every step."""
        self.elements = tf.nest.map_structure(tf.constant, arrays)
        self.spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), self.elements)

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        """See `Source`."""
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, numbers), self.elements)

    def describe(self, number: int) -> str:
        """See `Source`."""
        return f"sample {number} of {self.name}"

    def fingerprint(self) -> bytes:
        """Return the SHA-256 [32 bytes] of all values, types, shapes and names."""
        kinds = tf.nest.map_structure(lambda t: (t.dtype.name, *t.shape), self.elements)
        digest = hashlib.sha256(repr(kinds).encode())
        for tensor in tf.nest.flatten(self.elements):
            digest.update(tf.io.serialize_tensor(tensor).numpy() if tensor.dtype == tf.string else _bytes(tensor))
        return digest.digest()


def _described(elements: Any) -> str:
    kind = type(elements).__name__
    return f"a {kind} of {len(elements)}" if isinstance(elements, tuple | list) else kind


def _bytes(tensor: tf.Tensor) -> Any:
    return np.ascontiguousarray(tensor.numpy()).view(np.uint8)


def _without_lists(nest: Any) -> Any:
    """Turn lists into tuples: tf.data would stack a list into a tensor."""
    if isinstance(nest, dict):
        return {key: _without_lists(value) for key, value in nest.items()}
    return tuple(map(_without_lists, nest)) if isinstance(nest, list | tuple) else nest


def _is_list_of_numbers(part: Any) -> bool:
    """Whether `part` is a list of numbers (one array) and not a list of arrays (several inputs)."""
    return isinstance(part, list) and not any(hasattr(entry, "shape") for entry in part)


def _is_finite(array: np.ndarray) -> bool:
    """Whether `array` is certainly finite; False if its sum overflows, since one cheap pass cannot tell."""
    return not np.issubdtype(array.dtype, np.inexact) or bool(np.isfinite(array.sum(dtype=np.float64)))
