"""Hashes of tensors: compared among the ranks that hold the same shards, and one of the full model in any layout."""

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.runtime.placement import bounds_of, box_shape, boxes_of
from hvdtrain.state.named_tensors import NamedTensor, spec_of

_HASHED_BYTES = 8
_MULTIPLIER = 0x2545F4914F6CDD1D
"""Odd, so that multiplication modulo 2^64 is invertible; from Marsaglia's xorshift generators."""
_64_BITS = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio; odd, so that multiplication is invertible."""
_SUMMED_BYTES = 4
"""Bytes summed as one integer: a float sum would lose the sign of zero."""


def checksum(tensors: Mapping[str, tf.Variable]) -> int:
    """Return the CRC-32 of the values, in path order: 0.05 s per 200 MB."""
    crc = 0
    for _, variable in sorted(tensors.items()):
        crc = zlib.crc32(_octets(variable), crc)
    return crc


class TensorHashes:
    """Hashes tensors to 64 bits on their device: GPU tensors are not copied to the host.

    The hash function depends on the device only.
    """

    def __init__(self) -> None:
        self._on_device: Callable[[Sequence[tf.Variable]], tf.Tensor] = tf.function(
            lambda tensors: tf.stack([sum_of_bits(tensor.read_value()) for tensor in tensors]), autograph=False
        )

    def __call__(self, tensors: Sequence[tf.Variable]) -> np.ndarray:
        """Return the hashes, int64 [number of tensors]."""
        has_copies = any(isinstance(tensor, tf.distribute.DistributedValues) for tensor in tensors)
        if any("GPU" in tensor.device for tensor in tensors) and not has_copies:
            return self.on_device(tensors)
        return np.array([zlib.crc32(_octets(tensor)) for tensor in tensors], np.int64)

    def on_device(self, tensors: Sequence[tf.Variable]) -> np.ndarray:
        """Hash by TensorFlow ops, with three times the largest tensor's memory."""
        sums: np.ndarray = self._on_device(list(tensors)).numpy()
        return sums


def sum_of_bits(tensor: tf.Tensor) -> tf.Tensor:
    """Return an int64 of every bit of `tensor` and its position.

    Each 8 bytes form a number by invertible steps (products by odd numbers that depend on the position, a shift), so
    that a change of one of them always changes the sum.
    """
    words = _words(tensor)
    odd = 2 * tf.range(tf.size(words, out_type=tf.int64), dtype=tf.int64) + 1
    mixed = words * odd
    upper = tf.bitwise.right_shift(mixed, tf.constant(32, tf.int64))
    upper = tf.bitwise.bitwise_and(upper, tf.constant(0xFFFFFFFF, tf.int64))
    return tf.reduce_sum(tf.bitwise.bitwise_xor(mixed, upper) * tf.constant(_MULTIPLIER, tf.int64))


def _words(tensor: tf.Tensor) -> tf.Tensor:
    """Return the bits of `tensor` as int64 [words], zero-padded."""
    plain = tf.cast(tensor, tf.uint8) if tensor.dtype == tf.bool else tensor
    octets = tf.reshape(tf.bitcast(plain, tf.uint8), [-1])
    missing = -tf.size(octets, out_type=tf.int64) % _HASHED_BYTES
    return tf.bitcast(tf.reshape(tf.pad(octets, [[0, missing]]), [-1, _HASHED_BYTES]), tf.int64)


def _octets(variable: tf.Variable) -> memoryview:
    """Return the bytes of `variable`; on a CPU, its own memory."""
    return np.ascontiguousarray(variable.numpy()).reshape(-1).view(np.uint8).data


class Holders:
    """The groups of ranks that hold the same shard of each tensor. Collective to construct."""

    def __init__(self, backend: Backend, tensors: Mapping[str, NamedTensor]) -> None:
        self._backend = backend
        whole = all(tensor.replicated for tensor in tensors.values())
        self.split = backend.job_size > backend.processes or not whole
        """Whether ranks hold different tensors or shards."""
        self.groups: list[tuple[int, ...]] = []
        """Groups of several ranks with the same shard, if split."""
        self._places: dict[str, int] = {}
        """Index of the group of each shared shard."""
        self._group_of: dict[str, int] = {}
        if self.split:
            self._find(list(_keys(tensors).values()))

    def _find(self, mine: list[str]) -> None:
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(gather(self._backend, mine)):
            for key in theirs:
                holders.setdefault(key, []).append(rank)
        self.groups = sorted({tuple(ranks) for ranks in holders.values() if len(ranks) > 1})
        places = {ranks: place for place, ranks in enumerate(self.groups)}
        self._places = {key: places[tuple(holders[key])] for key in mine if len(holders[key]) > 1}

    def shared(self, tensors: Mapping[str, NamedTensor]) -> dict[str, NamedTensor]:
        """Return the tensors of which other ranks hold the same shard."""
        if not self.split:
            return dict(tensors)
        # With ZeRO-3 a rank temporarily holds full parameters.
        self._group_of = {path: self._places[key] for path, key in _keys(tensors).items() if key in self._places}
        return {path: tensors[path] for path in self._group_of}

    def sums(self, hashes: Mapping[str, int]) -> np.ndarray:
        """Return one checksum per group, int64, from the hashes of its tensors."""
        found = [0] * max(1, len(self.groups))
        for path, value in sorted(hashes.items()):
            place = self._group_of.get(path, 0)
            found[place] = (found[place] * _SPREAD + int(value) + 1) & _64_BITS
        return np.array(found, np.uint64).view(np.int64)

    def differing(self, sums: np.ndarray) -> tuple[int, int] | None:
        """Return the first rank that differs from its group's first, and that one, or None; `sums` [ranks, groups]."""
        for column, ranks in zip(sums.T, self.groups or [tuple(range(len(sums)))], strict=False):
            other = next((rank for rank in ranks if column[rank] != column[ranks[0]]), None)
            if other is not None:
                return other, ranks[0]
        return None

    def hashes_of_all(self, hashes: Mapping[str, int]) -> dict[str, list[dict[int, int]]]:
        """Return each path's hashes by shard group and rank. Collective."""
        mine = {path: [self._group_of.get(path, 0), int(value)] for path, value in hashes.items()}
        found: dict[str, dict[int, dict[int, int]]] = {}
        for rank, theirs in enumerate(gather(self._backend, mine)):
            for path, (group, value) in theirs.items():
                found.setdefault(path, {}).setdefault(group, {})[rank] = value
        return {path: list(groups.values()) for path, groups in found.items()}


def _keys(tensors: Mapping[str, NamedTensor]) -> dict[str, str]:
    """Return by path a key for this rank's shard."""
    return {path: json.dumps([path, *bounds_of(tensor.slice)]) for path, tensor in tensors.items()}


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
    words = tf.constant(np.pad(octets, (0, -octets.size % _SUMMED_BYTES)).view(np.int32))

    def reduce(mine: tf.Tensor) -> tf.Tensor:
        return backend.run(lambda: backend.everyone.all_reduce(mine, name=f"hash/{path}"))

    summed = tf.function(reduce, autograph=False).get_concrete_function(words)(words)
    return summed.numpy().tobytes()[: octets.size]


def _add(digest: "hashlib._Hash", path: str, dtype: str, shape: tuple[int, ...], content: bytes) -> None:
    digest.update(f"{path}:{dtype}:{shape}".encode())
    digest.update(content)
