"""Caches of decoded samples, in memory or in files that all ranks of a host share."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.data import Cache
from hvdtrain.config.errors import DataError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.bad_records import BadRecords
from hvdtrain.data.files import cache_folder, made_once
from hvdtrain.data.pipeline import ReadOptions
from hvdtrain.data.source import Source, gathered_in_python

CHUNK = 256
"""Samples decoded at a time."""


class MemoryMapped:
    """Decoded samples in memory-mapped files."""

    heavy = True

    def __init__(self, source: Source, arrays: list[np.ndarray]) -> None:
        self.name = source.name
        self.size = source.size
        self.spec = source.spec
        self.finite = source.finite
        self.describe = source.describe
        self.fingerprint = source.fingerprint
        self._arrays = arrays

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        return gathered_in_python(lambda numbers: [array[numbers] for array in self._arrays], numbers, self.spec)


def cached(source: Source, where: Cache) -> Source:
    """Return `source` with its samples decoded once; `source` itself for `none`, or if nothing needs decoding.

    Raises:
        DataError: a sample cannot be read, samples differ in shape, or the disk is full.
    """
    if where == "none" or not source.heavy:
        return source
    if not all(spec.shape.is_fully_defined() and spec.dtype != tf.string for spec in tf.nest.flatten(source.spec)):
        raise DataError(f"The samples of {source.name} differ in size or are text: they cannot be kept by --cache.")
    if where == "memory":
        arrays = [np.empty([source.size, *s.shape], s.dtype.as_numpy_dtype) for s in tf.nest.flatten(source.spec)]
        _fill(arrays, source)
        return ArraySource(tf.nest.pack_sequence_as(source.spec, arrays), source.name)
    return MemoryMapped(source, _in_files(source))


def _in_files(source: Source) -> list[np.ndarray]:
    specs = tf.nest.flatten(source.spec)
    # The fingerprint covers names and sizes alone, the same on every host; `version` notices files that were changed.
    version = source.version() if hasattr(source, "version") else b""
    name = f"decoded-{hashlib.sha256(source.fingerprint() + version).hexdigest()[:24]}"
    paths = [cache_folder() / f"{name}-{place}.npy" for place in range(len(specs))]
    # Written last: a list of files means that all of them are complete.
    with made_once(cache_folder() / f"{name}.json") as draft:
        if draft is not None:
            try:
                arrays = [_empty_file(path, spec, source.size) for path, spec in zip(paths, specs, strict=True)]
                _fill(arrays, source)
                for array in arrays:
                    array.flush()
                draft.write_text(json.dumps([path.name for path in paths]), encoding="utf-8")
            except OSError as error:
                for path in paths:
                    path.unlink(missing_ok=True)
                raise DataError(f"{source.name} cannot be kept in {draft.parent}: {error.strerror}.") from None
    return [np.load(path, mmap_mode="r") for path in paths]


def _empty_file(path: Path, spec: tf.TensorSpec, size: int) -> np.memmap:
    """Create a file for `size` samples with its blocks allocated: writing to a mapped page with none is a SIGBUS."""
    dtype, shape = np.dtype(spec.dtype.as_numpy_dtype), (size, *spec.shape)
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _fill(arrays: Sequence[np.ndarray], source: Source) -> None:
    starts = range(0, source.size, CHUNK)
    numbers = tf.data.Dataset.from_tensor_slices(tf.constant(starts, tf.int64))
    done = 0
    try:
        load = ReadOptions().batches(numbers, lambda first: source.gather(_chunk(source, first)), heavy=True)
        for first, part in zip(starts, load, strict=True):
            for array, tensor in zip(arrays, tf.nest.flatten(part), strict=True):
                array[first : first + CHUNK] = tensor.numpy()
            done += 1
    except tf.errors.OpError as error:
        BadRecords(source).examine(_chunk(source, starts[done]), error)


def _chunk(source: Source, first: Any) -> tf.Tensor:
    return tf.range(first, tf.minimum(tf.cast(first, tf.int64) + CHUNK, source.size), dtype=tf.int64)
