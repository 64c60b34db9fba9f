"""Restore the state from a checkpoint, on any number of ranks and in any layout."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.checkpoint.agreement import TIMEOUT_S, is_split, on_every_rank, on_primary
from hvdtrain.checkpoint.tensor_files import SliceReader
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.placement import whole_box
from hvdtrain.state.named_tensors import NamedTensor, elements, spec_of, values_in
from hvdtrain.state.train_state import OPTIONAL

Kind = tuple[str, tuple[int, ...]]
"""Dtype and global shape of a tensor."""


def restore(path: Path, tensors: Mapping[str, NamedTensor], ranks: Backend, *, partly: bool = False) -> dict[str, Any]:
    """Load the checkpoint at `path` into `tensors` and return its scalars. Collective.

    The primary reads the replicated tensors and broadcasts them. Each rank reads its slices of the others from the
    files; where a rank cannot see them, or sees another checkpoint of that name, the primary sends full tensors.

    Args:
        path: the checkpoint's folder, as the primary sees it.
        tensors: the state, by path; optional ones are left to `extras`.
        ranks: those that hold it.
        partly: the checkpoint may have others, which are left there.

    Raises:
        CheckpointError: it is damaged, or was written for another model or optimizer; the paths are named.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(OPTIONAL)}
    readers: list[SliceReader] = []
    """One on the primary."""

    def open_it() -> dict[str, Any]:
        readers.append(SliceReader(path))
        check_fit(path, readers[0], needed, partly=partly)
        return readers[0].scalars

    needed = _kinds_of_all(tensors, ranks) if is_split(ranks) else _kinds(tensors)
    scalars: dict[str, Any] = on_primary(ranks, open_it)
    sharded = dict(tensors)
    if not is_split(ranks):
        _restore_replicated({name: tensor for name, tensor in tensors.items() if tensor.replicated}, readers, ranks)
        sharded = {name: tensor for name, tensor in tensors.items() if not tensor.replicated}
        needed = _kinds(sharded)
    if needed:
        _restore_sharded(path, needed, tensors=sharded, readers=readers, ranks=ranks)
    return scalars


def contents(path: Path, ranks: Backend) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the checkpoint's tensors, and its scalars. Collective.

    Raises:
        CheckpointError: it is damaged.
    """

    def look() -> list[Any]:
        reader = SliceReader(path)
        return [list(reader.tensors), reader.scalars]

    names, scalars = on_primary(ranks, look)
    return names, scalars


def extras(path: Path, ranks: Backend, prefix: str) -> dict[str, np.ndarray]:
    """Return the checkpoint's tensors below `prefix`, which it need not have, by their path from there. Collective.

    Raises:
        CheckpointError: it is damaged.
    """
    readers: list[SliceReader] = []

    def look() -> list[Any]:
        readers.append(SliceReader(path))
        found = readers[0].tensors.items()
        return [[name, tensor.dtype, list(tensor.global_shape)] for name, tensor in found if name.startswith(prefix)]

    def read() -> None:
        for reader in readers:
            for name, variable in sent.items():
                shape = tuple(variable.shape)
                variable.assign(reader.read(name, shape, whole_box(shape)))

    listed = on_primary(ranks, look)
    sent = {name: tf.Variable(tf.zeros(shape, dtype), trainable=False) for name, dtype, shape in listed}
    if sent:
        on_every_rank(ranks, read)
        ranks.broadcast(sent, among="job")
    return {name.removeprefix(prefix): variable.numpy() for name, variable in sent.items()}


def check_fit(path: Path, reader: SliceReader, needed: Mapping[str, Kind], *, partly: bool = False) -> None:
    """Refuse a checkpoint whose tensors are not those that the state needs, or has them `partly`, by path.

    Raises:
        CheckpointError: naming the first that differ.
    """
    saved = {
        name: (tensor.dtype, tensor.global_shape)
        for name, tensor in reader.tensors.items()
        if not name.startswith(OPTIONAL) and (name in needed or not partly)
    }
    wrong = [
        f"{name}: saved {_words(saved.get(name))}, needed {_words(needed.get(name))}"
        for name in sorted({*saved, *needed})
        if not _fits(saved.get(name), needed.get(name))
    ]
    if wrong:
        more = f" … and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"The checkpoint {path} is of another model or optimizer: " + "; ".join(wrong[:3]) + f"{more}. "
            "It goes on with the same layers, in the same order, and the same kind of optimizer."
        )


def _restore_replicated(replicated: Mapping[str, NamedTensor], readers: list[SliceReader], ranks: Backend) -> None:
    def read_all() -> None:
        for reader in readers:
            _read(replicated, reader)

    on_every_rank(ranks, read_all)
    ranks.broadcast({path: tensor.value for path, tensor in replicated.items()})


def _restore_sharded(
    path: Path,
    needed: Mapping[str, Kind],
    tensors: Mapping[str, NamedTensor],
    readers: list[SliceReader],
    ranks: Backend,
) -> None:
    """Read this rank's slices, or receive the full tensors if not all ranks see the same checkpoint.

    Args:
        path: the checkpoint's folder.
        needed: the tensors of which any rank holds a slice, in the same order on each.
        tensors: those that this rank holds.
        readers: one on the primary.
        ranks: those that hold the state.
    """
    mine = readers or _readers_of_what_is_seen(path)
    seen = on_every_rank(ranks, lambda: mine[0].checksum if mine else None)
    if seen[0] is not None and seen == seen[:1] * len(seen):  # a disk of its own may hold another one of that name
        on_every_rank(ranks, lambda: _read(tensors, mine[0]))
        return
    for name, (dtype, shape) in needed.items():
        sent = tf.Variable(tf.zeros(shape, dtype), trainable=False)
        on_every_rank(ranks, partial(_read_full, name, sent, readers))
        ranks.broadcast({f"restore/{name}": sent}, among="job")
        if name in tensors:
            _assign(tensors[name], values_in(sent.numpy(), tensors[name].slice))


def _readers_of_what_is_seen(path: Path) -> list[SliceReader]:
    """Return a reader of the checkpoint, unless this rank cannot see it."""
    try:
        return [SliceReader(path)]
    except CheckpointError:
        return []


def _read(tensors: Mapping[str, NamedTensor], reader: SliceReader) -> None:
    for name, tensor in tensors.items():
        _assign(tensor, reader.read(name, tensor.global_shape, tensor.slice))


def _read_full(name: str, sent: tf.Variable, readers: Sequence[SliceReader]) -> None:
    for reader in readers:
        sent.assign(reader.read(name, tuple(sent.shape), whole_box(sent.shape)))


def _assign(tensor: NamedTensor, array: np.ndarray) -> None:
    """Assign values, followed by zeros where the tensor is longer than its slice; see `NamedTensor`."""
    shape = tuple(tensor.value.shape)
    if not array.size:
        array = np.zeros(shape, array.dtype)
    if array.ndim != len(shape):
        array = array.reshape(shape)
    if array.shape != shape:
        array = np.pad(array, [(0, have - need) for have, need in zip(shape, array.shape, strict=True)])
    tensor.value.assign(array)


def _kinds(tensors: Mapping[str, NamedTensor]) -> dict[str, Kind]:
    return {name: (spec_of(name, tensor).dtype, tensor.global_shape) for name, tensor in tensors.items()}


def _kinds_of_all(tensors: Mapping[str, NamedTensor], ranks: Backend) -> dict[str, Kind]:
    """Return the tensors that all processes hold together, in the same order on each."""
    everyone = ranks.gather_bytes(json.dumps(_kinds(tensors)).encode(), timeout=TIMEOUT_S)
    return {name: (kind[0], tuple(kind[1])) for text in everyone for name, kind in json.loads(text).items()}


def _fits(saved: Kind | None, needed: Kind | None) -> bool:
    """Return whether one can be read as the other: they are equal, or one is the other flattened."""
    if saved is None or needed is None or saved == needed:
        return saved == needed
    flat = 1 in (len(saved[1]), len(needed[1]))
    return saved[0] == needed[0] and flat and elements(saved[1]) == elements(needed[1])


def _words(kind: Kind | None) -> str:
    return "nothing" if kind is None else f"{[kind[0], list(kind[1])]}"
