"""The index of a checkpoint: its scalars, its tensors with the slices that each file holds, and all SHA-256."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.placement import Box, box_shape
from hvdtrain.state.named_tensors import elements

FORMAT = 3
NAME = "index.json"

_NUMPY = [np.dtype(code) for code in f"?{np.typecodes['AllInteger']}efdFD"]
_NARROW = [
    np.dtype(kind) for kind in vars(ml_dtypes).values() if isinstance(kind, type) and issubclass(kind, np.generic)
]
_DTYPES = {kind.name: kind for kind in [*_NUMPY, *_NARROW]}
SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    **{f"{sign}{bits}": f"{code}{bits}" for sign, code in (("int", "I"), ("uint", "U")) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
}
"""What safetensors calls the dtypes that its NumPy reader knows.

Tensors of others (float8, 4-bit integers, complex128) are stored as U8 with one more dim, the bytes of an element.
"""


def is_numeric(name: str) -> bool:
    """Return whether tensors of the dtype called `name` can be stored."""
    return name in _DTYPES


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of plain numbers called `name`.

    Raises:
        ValueError: it is not one. Arrays of objects would take a file's bytes for references.
    """
    if not is_numeric(name):
        raise ValueError(f"{name!r} is not a dtype of numbers")
    return _DTYPES[name]


@dataclass(frozen=True)
class StoredSlice:
    """A slice of a tensor, stored in a safetensors file under a name of its own."""

    bounds: tuple[tuple[int, int], ...]
    """Start and stop in each dim of the full tensor."""
    file: str
    name: str
    """The path of the tensor, followed by the bounds if the slice is not all of it."""
    sha256: str

    @property
    def box(self) -> Box:
        """The slice of the full tensor."""
        return tuple(slice(start, stop) for start, stop in self.bounds)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the slices that it is stored in."""

    dtype: str
    global_shape: tuple[int, ...]
    slices: tuple[StoredSlice, ...]


@dataclass(frozen=True, kw_only=True)
class Index:
    """The contents of a checkpoint."""

    scalars: Mapping[str, Any]
    files: Mapping[str, int]
    """Sizes of the safetensors files in bytes."""
    tensors: Mapping[str, StoredTensor]
    """By structural path."""
    saved_at: float
    """Seconds since 1970."""
    step: int | None
    """The step it was saved as; None if its folder is not named by a step."""

    @property
    def checksum(self) -> str:
        """SHA-256 of the index, the same for every copy of a checkpoint."""
        return _checksum(_content_of(self))


Entries = list[list[Any]]
"""Path, dtype, global shape, bounds, file, name and SHA-256 of each slice in a rank's file."""


def merged(entries: Sequence[Entries]) -> dict[str, StoredTensor]:
    """Return the tensors whose slices the ranks have written; see `write_tensors`.

    Raises:
        CheckpointError: the slices of a tensor leave gaps or overlap.
    """
    tensors: dict[str, StoredTensor] = {}
    for path, dtype, shape, *stored in itertools.chain.from_iterable(entries):
        earlier = tensors.get(path, StoredTensor(dtype, tuple(shape), ()))
        tensors[path] = StoredTensor(dtype, tuple(shape), (*earlier.slices, _stored_slice(*stored)))
    try:
        for path, tensor in tensors.items():
            _check_complete(path, tensor)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return tensors


def encode(index: Index) -> str:
    """Return the text of the index, with its own checksum."""
    content = _content_of(index)
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1)


def read_index(path: Path) -> Index:
    """Read the index of the checkpoint at `path`, and compare the sizes of its files.

    Nothing in it is trusted: files, shapes and dtypes are checked before they are used.

    Raises:
        CheckpointError: it is damaged, or of another format.
    """
    try:
        content = json.loads((path / NAME).read_text(encoding="utf-8"))
        if int(content["format"]) != FORMAT:
            raise CheckpointError(f"The checkpoint {path} has format {content['format']}, not {FORMAT}.")
        if content.pop("checksum") != _checksum(content):
            raise CheckpointError(f"The checkpoint {path} is damaged: {NAME} is not as it was written.")
        files = {str(name): int(size) for name, size in content["files"].items()}
        for name, size in files.items():
            if Path(name).name != name:
                raise ValueError(f"{name!r} is not a file in it")
            if (path / name).stat().st_size != size:
                raise CheckpointError(f"The checkpoint {path} is damaged: {name} does not have its recorded size.")
        tensors = {name: _stored_tensor(name, tensor, files) for name, tensor in content["tensors"].items()}
        return Index(
            scalars=dict(content["scalars"]),
            files=files,
            tensors=tensors,
            saved_at=float(content["saved_at"]),
            step=content["step"],
        )
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    """Return the error that names the checkpoint at `path` and the cause."""
    cause = f"{NAME} is not as it was written"
    if isinstance(error, OSError):
        cause = f"{Path(error.filename or NAME).name}: {error.strerror or error}"
    elif type(error) is ValueError:
        cause = str(error).rstrip(".")
    return CheckpointError(f"The checkpoint {path} is damaged: {cause}.")


def _stored_tensor(path: str, content: Mapping[str, Any], files: Mapping[str, int]) -> StoredTensor:
    slices = tuple(_stored_slice(**stored) for stored in content["slices"])
    tensor = StoredTensor(content["dtype"], tuple(content["global_shape"]), slices)
    numpy_dtype(tensor.dtype)
    for stored in slices:
        if stored.file not in files:
            raise ValueError(f"{path} is in {stored.file!r}, which is not a file of the checkpoint")
        bounds = zip(stored.bounds, tensor.global_shape, strict=True)
        if not all(0 <= start <= stop <= length for (start, stop), length in bounds):
            raise ValueError(f"{path} has a slice {stored.bounds} outside of its shape {tensor.global_shape}")
    _check_complete(path, tensor)
    return tensor


def _stored_slice(bounds: Any, file: str, name: str, sha256: str) -> StoredSlice:
    return StoredSlice(tuple((start, stop) for start, stop in bounds), file, name, sha256)


def _check_complete(path: str, tensor: StoredTensor) -> None:
    """Refuse slices that leave gaps in their tensor, or overlap."""
    written = sum(elements(box_shape(stored.box)) for stored in tensor.slices)
    if written != elements(tensor.global_shape) or _overlap(tensor.slices):
        raise ValueError(
            f"Of {path} the ranks hold {written} of {elements(tensor.global_shape)} elements together: its slices "
            "leave gaps or overlap."
        )


def _overlap(slices: Sequence[StoredSlice]) -> bool:
    """Return whether two of `slices` have elements in common."""
    boxes = sorted(stored.bounds for stored in slices)
    for place, box in enumerate(boxes):
        for other in boxes[place + 1 :]:
            # Sorted by the first dim: once one begins behind this box, so do all that follow.
            if box and other[0][0] >= box[0][1]:
                break
            if all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(box, other, strict=True)):
                return True
    return False


def _content_of(index: Index) -> dict[str, Any]:
    return {"format": FORMAT, **asdict(index)}


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
