"""Layout-independent hash of a split model."""

import hashlib
import json
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.state.named_tensors import NamedTensor, bounds_of, box_shape, boxes_of, spec_of

_WORD = 4
"""Bytes summed as one integer: a float sum would lose the sign of zero."""


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of path, dtype, shape and bytes of full arrays."""
    digest = hashlib.sha256()
    for path, array in sorted(arrays.items()):
        _add(
            digest, path=path, dtype=str(array.dtype), shape=array.shape, content=np.ascontiguousarray(array).tobytes()
        )
    return digest.hexdigest()


def digest_of_parts(parts: Mapping[str, NamedTensor], backend: Backend, *, timeout: float) -> str:
    """Return `digest_of` the full tensors from all ranks' shards. Collective over the job.

    Materializes one full tensor at a time.

    Args:
        timeout: in seconds.
    """
    specs = {path: spec_of(path, tensor) for path, tensor in parts.items()}
    mine = {path: [spec.dtype, list(spec.global_shape), bounds_of(spec.slice)] for path, spec in specs.items()}
    listed = gather(backend, mine, timeout=timeout)
    kinds = {path: (dtype, tuple(shape)) for theirs in listed for path, (dtype, shape, _) in theirs.items()}
    before = {(path, json.dumps(held)) for theirs in listed[: backend.rank] for path, (*_, held) in theirs.items()}
    digest = hashlib.sha256()
    for path, (dtype, shape) in sorted(kinds.items()):
        whole = np.zeros(shape, tf.as_dtype(dtype).as_numpy_dtype)
        if path in specs and (path, json.dumps(bounds_of(specs[path].slice))) not in before:
            values = _values(parts[path])
            for box, place in boxes_of(specs[path].slice):
                whole[box] = values[place]
        _add(digest, path=path, dtype=dtype, shape=shape, content=_summed(whole, backend, path))
    return digest.hexdigest()


def _values(tensor: NamedTensor) -> np.ndarray:
    """Return a shard's values without padding."""
    shape = box_shape(tensor.slice)
    array: np.ndarray = np.asarray(tensor.value.numpy())
    return array[tuple(slice(0, n) for n in shape)] if array.ndim == len(shape) else array.reshape(shape)


def _summed(whole: np.ndarray, backend: Backend, path: str) -> bytes:
    """All-reduce a partially filled full tensor, and return its bytes."""
    octets = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)
    if not octets.size:
        return b""
    words = tf.constant(np.pad(octets, (0, -octets.size % _WORD)).view(np.int32))

    def reduce(mine: tf.Tensor) -> tf.Tensor:
        return backend.run(lambda: backend.everyone.all_reduce(mine, name=f"hash/{path}"))

    summed = tf.function(reduce, autograph=False).get_concrete_function(words)(words)
    return summed.numpy().tobytes()[: octets.size]


def _add(digest: "hashlib._Hash", path: str, dtype: str, shape: tuple[int, ...], content: bytes) -> None:
    digest.update(f"{path}:{dtype}:{shape}".encode())
    digest.update(content)
