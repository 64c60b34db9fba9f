"""The safetensors file of a rank: written tensor by tensor, read by slices of any layout, and verified."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from hvdtrain.checkpoint.index import (
    SAFETENSORS_DTYPES,
    Entries,
    StoredSlice,
    StoredTensor,
    is_numeric,
    numpy_dtype,
    read_index,
)
from hvdtrain.checkpoint.naming import step_named
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.placement import Box, Region, box_shape, boxes_of, whole_box
from hvdtrain.state.named_tensors import StateSpec, elements, values_in

_METADATA = "__metadata__"
_OPEN_FILES = 64
"""Of one reader: each rank has written a file, and reading its header again for every tensor would take long."""


class Owned(NamedTuple):
    """A slice that this rank writes; its values are read as they are written."""

    spec: StateSpec
    value: Any
    """A variable, or an array that nobody changes."""

    def array(self) -> np.ndarray:
        """Return the values without padding, in row-major order."""
        array = np.asarray(self.value if isinstance(self.value, np.ndarray) else self.value.numpy())
        shape = box_shape(self.spec.slice)
        if array.ndim != len(shape):
            return np.ascontiguousarray(array.reshape(shape))
        return np.ascontiguousarray(array[tuple(slice(0, n) for n in shape)])


def write_tensors(file: Path, tensors: Sequence[Owned]) -> Entries:
    """Write `tensors` to a new safetensors file and force it to disk; return what the index says of them.

    A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON, padded to 8 bytes) and
    the values. All of the header is known beforehand: one tensor at a time is copied from its device, and none is
    copied again. The header's metadata name the dtypes of tensors that are stored as U8.

    Raises:
        CheckpointError: a tensor of strings or the like, or two tensors of one name.
    """
    for spec in (tensor.spec for tensor in tensors):
        if not is_numeric(spec.dtype):
            raise CheckpointError(f"checkpoints hold numbers. Received: {spec.path} of dtype {spec.dtype}.")
    widest_first = sorted(tensors, key=lambda tensor: -numpy_dtype(tensor.spec.dtype).itemsize)  # keeps each aligned
    header: dict[str, Any] = {_METADATA: {}}
    end = 0
    for spec in (tensor.spec for tensor in widest_first):
        for box, _ in boxes_of(spec.slice):
            name, (dtype, shape) = _name_of(spec, box), _stored_as(spec.dtype, box_shape(box))
            if name in header:
                raise CheckpointError(f"two of its tensors are called {name}.")
            begin, end = end, end + elements(box_shape(box)) * numpy_dtype(spec.dtype).itemsize
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            if spec.dtype not in SAFETENSORS_DTYPES:
                header[_METADATA][name] = spec.dtype
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    entries: Entries = []
    with open(file, "xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in widest_first:
            array, spec = tensor.array(), tensor.spec
            for box, place in boxes_of(spec.slice):
                content = np.ascontiguousarray(array[place]).reshape(-1).view(np.uint8).data
                name, bounds = _name_of(spec, box), [[part.start, part.stop] for part in box]
                begin, end = header[name]["data_offsets"]
                assert content.nbytes == end - begin, f"{name} has {content.nbytes} bytes in place of {end - begin}"
                stream.write(content)
                digest = hashlib.sha256(content).hexdigest()
                entries.append([spec.path, spec.dtype, list(spec.global_shape), bounds, file.name, name, digest])
        stream.flush()
        os.fsync(stream.fileno())
    return entries


def _name_of(spec: StateSpec, box: Box) -> str:
    if box == whole_box(spec.global_shape):
        return spec.path
    return f"{spec.path}[{','.join(f'{part.start}:{part.stop}' for part in box)}]"


def _stored_as(dtype: str, shape: Sequence[int]) -> tuple[str, list[int]]:
    """Return the dtype and the shape of a tensor in a safetensors file; see `SAFETENSORS_DTYPES`."""
    if dtype in SAFETENSORS_DTYPES:
        return SAFETENSORS_DTYPES[dtype], list(shape)
    return "U8", [*shape, numpy_dtype(dtype).itemsize]


class SliceReader:
    """Reads the tensors of a checkpoint, whatever number of ranks wrote them.

    Args:
        path: the checkpoint's folder.

    Raises:
        CheckpointError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index = read_index(path)
        # Not memory-mapped: a disk that fails then ends the process by SIGBUS, and each slice is hashed as a whole.
        self._file = lru_cache(_OPEN_FILES)(lambda name: safe_open(path / name, framework="np", backend="pread"))

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The stored tensors by path."""
        return self._index.tensors

    @property
    def checksum(self) -> str:
        """SHA-256 of the index, which tells this checkpoint from others of its name."""
        return self._index.checksum

    @property
    def scalars(self) -> dict[str, Any]:
        """The scalars that were saved."""
        return dict(self._index.scalars)

    def read(self, path: str, global_shape: tuple[int, ...], region: Region) -> np.ndarray:
        """Return `region` of a tensor of `global_shape`.

        A tensor that was stored flat, in row-major order, can be read in any shape, and the other way round.

        Raises:
            CheckpointError: the bytes are not those that were written.
        """
        stored = self.tensors[path]
        if stored.global_shape != global_shape:
            full = self._assembled(path, stored, whole_box(stored.global_shape))
            return values_in(full.reshape(global_shape), region)
        boxes = list(boxes_of(region))
        if len(boxes) == 1:
            return self._assembled(path, stored, boxes[0][0])
        result = np.empty(box_shape(region), numpy_dtype(stored.dtype))
        for box, place in boxes:
            result[place] = self._assembled(path, stored, box)
        return result

    def verify(self) -> None:
        """Read every slice, one at a time, and compare it with its SHA-256.

        Raises:
            CheckpointError: naming the first tensor that is damaged, or the step whose name the checkpoint has taken.
        """
        named = step_named(self._path)
        if None not in (named, self._index.step) and named != self._index.step:
            raise CheckpointError(
                f"The checkpoint {self._path} is damaged: it is that of step {self._index.step}, under another's name."
            )
        for path, tensor in self.tensors.items():
            for stored in tensor.slices:
                self._slice(path, tensor.dtype, stored)

    def _assembled(self, path: str, tensor: StoredTensor, box: Box) -> np.ndarray:
        """Return `box`, assembled from the slices that overlap with it."""
        for stored in tensor.slices:
            if stored.box == box:
                return self._slice(path, tensor.dtype, stored)
        result = np.empty(box_shape(box), numpy_dtype(tensor.dtype))
        for stored in tensor.slices:
            overlap = tuple(
                slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(stored.box, box, strict=True)
            )
            if elements(box_shape(overlap)):
                values = self._slice(path, tensor.dtype, stored)
                result[_within(overlap, box)] = values[_within(overlap, stored.box)]
        return result

    def _slice(self, path: str, dtype: str, stored: StoredSlice) -> np.ndarray:
        """Return a stored slice, compared with its SHA-256."""
        shape, kind = box_shape(stored.box), numpy_dtype(dtype)
        try:
            file: Any = self._file(stored.file)
            view = file.get_slice(stored.name)
            found = view.get_dtype(), list(view.get_shape())
            content = np.ascontiguousarray(file.get_tensor(stored.name)) if found == _stored_as(dtype, shape) else None
        except (OSError, SafetensorError) as error:
            cause = getattr(error, "strerror", None) or error
            raise CheckpointError(f"The checkpoint {self._path} is damaged: {stored.file}: {cause}.") from error
        if content is None or hashlib.sha256(content.reshape(-1).view(np.uint8).data).hexdigest() != stored.sha256:
            raise CheckpointError(
                f"The checkpoint {self._path} is damaged: in {stored.file} the bytes of {path} are not those that were "
                "written."
            )
        return content.view(kind).reshape(shape)


def _within(box: Box, outer: Box) -> Box:
    """Return `box` relative to `outer`."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))
