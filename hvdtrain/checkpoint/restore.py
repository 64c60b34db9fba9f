"""How the state comes back, on any number of ranks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint import manifest
from hvdtrain.checkpoint.agreement import TIMEOUT_S, Ranks, is_split, on_every_rank
from hvdtrain.checkpoint.earlier_format import EarlierReader
from hvdtrain.checkpoint.slices import SliceReader
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.placement import whole_box
from hvdtrain.state.named_tensors import NamedTensor, elements, spec_of, values_in
from hvdtrain.state.train_state import EXTRA

Reader = SliceReader | EarlierReader


def restore(
    path: Path, tensors: Mapping[str, NamedTensor], ranks: Ranks, *, earlier_names: Sequence[str] = ()
) -> dict[str, Any]:
    """Load the checkpoint at `path` into `tensors`, and return its scalars; called on every rank.

    The primary reads what all hold alike, and the others receive it. A slice is read from the files by the rank that
    holds it, or sent by the primary where a rank cannot see them, or sees another checkpoint of that name.

    Args:
        path: the checkpoint's folder, as the primary sees it.
        tensors: the state, by path.
        ranks: those that hold it.
        earlier_names: what a checkpoint of format 1 calls the tensors, in their order.

    Raises:
        CheckpointError: it is damaged, or was written for another model or optimizer; the paths are named.
    """
    readers: list[Reader] = []

    def open_it() -> dict[str, Any]:
        if not ranks.primary:
            return {}
        readers.append(_reader(path, tensors, earlier_names))
        check_fit(path, readers[0], needed)
        return readers[0].scalars

    needed = _kinds_of_all(tensors, ranks) if is_split(ranks) else _kinds(tensors)
    scalars: dict[str, Any] = on_every_rank(ranks, open_it)[0]
    if is_split(ranks):
        _restore_parts(path, tensors=tensors, needed=needed, readers=readers, ranks=ranks)
        return scalars
    _restore_replicated(tensors, readers, ranks)
    _restore_slices(path, tensors, readers, ranks)
    return scalars


def extras(path: Path, ranks: Ranks) -> dict[str, np.ndarray]:
    """Return on every rank the tensors of the checkpoint at `path` that no state needs, by their path below `EXTRA`.

    Raises:
        CheckpointError: it is damaged.
    """
    readers: list[SliceReader] = []

    def look() -> list[Any]:
        if not ranks.primary or manifest.format_of(path) == 1:
            return []
        readers.append(SliceReader(path))
        found = readers[0].tensors.items()
        return [[name, tensor.dtype, list(tensor.global_shape)] for name, tensor in found if name.startswith(EXTRA)]

    def read() -> None:
        for reader in readers:
            for name, variable in sent.items():
                shape = tuple(variable.shape)
                variable.assign(reader.read(name, shape, whole_box(shape)))

    listed = on_every_rank(ranks, look)[0]
    sent = {name: tf.Variable(tf.zeros(shape, dtype), trainable=False) for name, dtype, shape in listed}
    if sent:
        on_every_rank(ranks, read)
        ranks.broadcast(sent, among="job")
    return {name.removeprefix(EXTRA): variable.numpy() for name, variable in sent.items()}


def _restore_replicated(tensors: Mapping[str, NamedTensor], readers: list[Reader], ranks: Ranks) -> None:
    replicated = {path: tensor for path, tensor in tensors.items() if tensor.replicated}

    def read_all() -> None:
        for reader in readers:
            for path, tensor in replicated.items():
                _assign(tensor, reader.read(path, tensor.global_shape, tensor.slice))

    on_every_rank(ranks, read_all)
    ranks.broadcast({path: tensor.value for path, tensor in replicated.items()})


def _restore_parts(
    path: Path, tensors: Mapping[str, NamedTensor], needed: Mapping[str, "Kind"], readers: list[Reader], ranks: Ranks
) -> None:
    """Let each process take its part of the model; `needed` is what all of them hold together."""
    if _is_seen_by_all(path, mine := readers or _readers_of_what_is_seen(path), ranks):
        on_every_rank(ranks, lambda: _read_slices(tensors, mine[0]))
        return
    for name, (dtype, shape) in needed.items():
        _send_slices(
            name,
            sent=tf.Variable(tf.zeros(shape, dtype), trainable=False),
            tensor=tensors.get(name),
            readers=readers,
            ranks=ranks,
        )


def _restore_slices(path: Path, tensors: Mapping[str, NamedTensor], readers: list[Reader], ranks: Ranks) -> None:
    slices = {name: tensor for name, tensor in tensors.items() if not tensor.replicated}
    if not slices:
        return
    if _is_seen_by_all(path, mine := readers or _readers_of_what_is_seen(path), ranks):
        on_every_rank(ranks, lambda: _read_slices(slices, mine[0]))
        return
    for name, tensor in slices.items():
        sent = tf.Variable(tf.zeros(tensor.global_shape, tensor.value.dtype), trainable=False)
        _send_slices(name, sent=sent, tensor=tensor, readers=readers, ranks=ranks)


def _is_seen_by_all(path: Path, mine: Sequence[Reader], ranks: Ranks) -> bool:
    """Tell whether every rank sees the same checkpoint: a disk of its own may hold another one of that name."""
    seen = on_every_rank(ranks, lambda: mine[0].checksum if mine else None)
    return all(checksum is not None and checksum == seen[0] for checksum in seen)


def _send_slices(name: str, sent: tf.Variable, tensor: NamedTensor | None, readers: list[Reader], ranks: Ranks) -> None:
    """Let the primary send all of a tensor, of which every rank that holds some of it takes its slice."""
    shape = tuple(sent.shape)

    def read() -> None:
        for reader in readers:
            sent.assign(reader.read(name, shape, whole_box(shape)))

    on_every_rank(ranks, read)
    ranks.broadcast({f"restore/{name}": sent}, among="job")
    if tensor is not None:
        _assign(tensor, values_in(sent.numpy(), tensor.slice))


def _read_slices(slices: Mapping[str, NamedTensor], reader: Reader) -> None:
    for name, tensor in slices.items():
        _assign(tensor, reader.read(name, tensor.global_shape, tensor.slice))


def _readers_of_what_is_seen(path: Path) -> list[Reader]:
    """Return a reader of the checkpoint, unless this rank cannot see it."""
    try:
        return [SliceReader(path)]
    except CheckpointError:
        return []


def _assign(tensor: NamedTensor, array: np.ndarray) -> None:
    """Give `tensor` these values, and zeros where it is longer than its slice; see `NamedTensor`."""
    shape = tuple(tensor.value.shape)
    if array.ndim != len(shape):
        array = array.reshape(shape)
    if array.shape != shape:
        array = np.pad(array, [(0, have - need) for have, need in zip(shape, array.shape, strict=True)])
    tensor.value.assign(array)


def _reader(path: Path, tensors: Mapping[str, NamedTensor], earlier_names: Sequence[str]) -> Reader:
    if manifest.format_of(path) == 1:
        return EarlierReader(path, dict(zip(tensors, earlier_names, strict=False)))
    return SliceReader(path)


def check_fit(path: Path, reader: Reader, needed: Mapping[str, "Kind"]) -> None:
    """Refuse a checkpoint whose tensors are not those that the state needs, by path.

    Raises:
        CheckpointError: naming the first that differ.
    """
    saved = {
        name: (tensor.dtype, tensor.global_shape)
        for name, tensor in reader.tensors.items()
        if not name.startswith(EXTRA)
    }
    wrong = [
        f"{name}: saved {_words(saved.get(name))}, needed {_words(needed.get(name))}"
        for name in sorted({*saved, *needed})
        if not _fits(saved.get(name), needed.get(name))
    ]
    if wrong:
        more = f" … and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"The checkpoint {path} is of another model or optimizer: " + "; ".join(wrong[:3]) + more + "."
        )


Kind = tuple[str, tuple[int, ...]]


def _kinds(tensors: Mapping[str, NamedTensor]) -> dict[str, Kind]:
    return {name: (spec_of(name, tensor).dtype, tensor.global_shape) for name, tensor in tensors.items()}


def _kinds_of_all(tensors: Mapping[str, NamedTensor], ranks: Ranks) -> dict[str, Kind]:
    """Return what all processes hold together, in the same order on each."""
    everyone = ranks.gather_bytes(json.dumps(_kinds(tensors)).encode(), timeout=TIMEOUT_S)
    return {name: (kind[0], tuple(kind[1])) for text in everyone for name, kind in json.loads(text).items()}


def _fits(saved: Kind | None, needed: Kind | None) -> bool:
    """Tell whether one can be read as the other: alike, or one of them flat with as many elements."""
    if saved is None or needed is None or saved == needed:
        return saved == needed
    flat = 1 in (len(saved[1]), len(needed[1]))
    return saved[0] == needed[0] and flat and elements(saved[1]) == elements(needed[1])


def _words(kind: Kind | None) -> str:
    return "nothing" if kind is None else f"{[kind[0], list(kind[1])]}"
