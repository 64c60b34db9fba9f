"""The manifest: what a checkpoint holds, in which files, and the checksums of all of it."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.dtypes import numpy_dtype
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.placement import Box, box_shape
from hvdtrain.state.named_tensors import elements

FORMAT = 2
NAME = "manifest.json"


@dataclass(frozen=True)
class StoredSlice:
    """A slice of a tensor, as it lies in a file in row-major order."""

    bounds: tuple[tuple[int, int], ...]
    """Start and stop for each dim of the whole tensor."""
    file: str
    offset: int
    sha256: str

    @property
    def box(self) -> Box:
        """The slice of the whole tensor."""
        return tuple(slice(start, stop) for start, stop in self.bounds)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the slices that it was stored in."""

    dtype: str
    global_shape: tuple[int, ...]
    slices: tuple[StoredSlice, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    scalars: Mapping[str, Any]
    files: Mapping[str, int]
    """Sizes of the files of tensors."""
    tensors: Mapping[str, StoredTensor]
    """By structural path."""
    saved_at: float = 0.0
    """Seconds since 1970; 0 where an earlier version wrote it, which did not say."""
    step: int | None = None
    """The step that it was saved as; None where an earlier version wrote it."""

    @property
    def checksum(self) -> str:
        """SHA-256 of all of it: the same for the same checkpoint, wherever it lies."""
        return _checksum(_encoded(self))


def merged(entries: Sequence[Sequence[Any]]) -> dict[str, StoredTensor]:
    """Return the tensors of which every rank has written some slices; see `write_tensors`.

    Raises:
        CheckpointError: a slice that no rank has written.
    """
    tensors: dict[str, StoredTensor] = {}
    for path, dtype, shape, *piece in itertools.chain.from_iterable(entries):
        earlier = tensors.get(path, StoredTensor(dtype, tuple(shape), ()))
        tensors[path] = StoredTensor(dtype, tuple(shape), (*earlier.slices, _stored_slice(*piece)))
    for path, tensor in tensors.items():
        _check_whole(path, tensor)
    return tensors


def _check_whole(path: str, tensor: StoredTensor) -> None:
    """Refuse slices that are not all of their tensor, or more."""
    written = sum(elements(box_shape(stored.box)) for stored in tensor.slices)
    if written != elements(tensor.global_shape) or _overlap(tensor.slices):
        raise CheckpointError(
            f"Of {path} the ranks hold {written} of {elements(tensor.global_shape)} elements together: its slices "
            "leave gaps or overlap."
        )


def _overlap(slices: Sequence[StoredSlice]) -> bool:
    """Tell whether two of `slices` have elements in common."""
    boxes = sorted(stored.bounds for stored in slices)
    for place, box in enumerate(boxes):
        for other in boxes[place + 1 :]:
            # In order of the first dim: what begins behind this one is followed by nothing that does not.
            if box and other[0][0] >= box[0][1]:
                break
            if all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(box, other, strict=True)):
                return True
    return False


def _stored_slice(bounds: Any, file: str, offset: int, sha256: str) -> StoredSlice:
    return StoredSlice(tuple((start, stop) for start, stop in bounds), file, offset, sha256)


def encode(manifest: Manifest) -> str:
    """Return the manifest's text, with its own checksum."""
    content = _encoded(manifest)
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1)


def _encoded(manifest: Manifest) -> dict[str, Any]:
    return {"format": FORMAT, **asdict(manifest)}


def format_of(path: Path) -> int:
    """Return the format of the checkpoint at `path`.

    Raises:
        CheckpointError: its manifest is damaged.
    """
    return int(_content(path)["format"])


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at `path`, once the sizes of its files have been looked at.

    Whoever wrote it: what it says of files, shapes and dtypes is checked before anything is done by it.

    Raises:
        CheckpointError: it is damaged, or of another format.
    """
    content = _content(path)
    if content["format"] != FORMAT:
        raise CheckpointError(f"The checkpoint {path} has format {content['format']}, not {FORMAT}.")
    checksum = content.pop("checksum", None)
    if checksum != _checksum(content):
        raise CheckpointError(f"The checkpoint {path} is damaged: {NAME} is not as it was written.")
    check_sizes(path, content["files"])
    try:
        return _decoded(content)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, CheckpointError) as error:
        raise damaged(path, error) from error


def _decoded(content: Mapping[str, Any]) -> Manifest:
    """Return the manifest that `content` describes, checked as `_check_slice` says."""
    tensors = {
        name: StoredTensor(
            tensor["dtype"],
            tuple(tensor["global_shape"]),
            tuple(_stored_slice(**stored) for stored in tensor["slices"]),
        )
        for name, tensor in content["tensors"].items()
    }
    for name, tensor in tensors.items():
        for stored in tensor.slices:
            _check_slice(name, tensor, stored, content["files"])
        _check_whole(name, tensor)
    saved = float(content.get("saved_at", 0.0))
    return Manifest(
        scalars=dict(content["scalars"]),
        files=content["files"],
        tensors=tensors,
        saved_at=saved,
        step=content.get("step"),
    )


def _check_slice(name: str, tensor: StoredTensor, stored: StoredSlice, files: Mapping[str, int]) -> None:
    """Refuse a slice that is none of its tensor's, or that lies elsewhere than in a file of the checkpoint."""
    if Path(stored.file).name != stored.file or stored.file not in files:
        raise ValueError(f"{name} lies in {stored.file!r}, which is no file of it")
    within = all(
        0 <= start <= stop <= length for (start, stop), length in zip(stored.bounds, tensor.global_shape, strict=True)
    )
    if not within or not 0 <= stored.offset <= files[stored.file] - stored_bytes(tensor, stored):
        raise ValueError(f"{name} has a slice {stored.bounds} that does not fit it or its file")


def stored_bytes(tensor: StoredTensor, stored: StoredSlice) -> int:
    """Return the size of a slice in its file."""
    return elements(box_shape(stored.box)) * numpy_dtype(tensor.dtype).itemsize


def scalars_of(path: Path) -> dict[str, Any]:
    """Return the scalars of the checkpoint at `path`, of whatever format.

    Raises:
        CheckpointError: it is damaged.
    """
    content = _content(path)
    scalars: dict[str, Any] = content["scalars"] if content["format"] == 1 else dict(read_manifest(path).scalars)
    return scalars


def saved_at(path: Path) -> float:
    """Return when the checkpoint at `path` was saved, in seconds since 1970.

    Raises:
        CheckpointError: it is damaged.
    """
    content = _content(path)
    return float(content.get("saved_at") or (path / NAME).stat().st_mtime)


def check_sizes(path: Path, files: Mapping[str, int]) -> None:
    """Refuse the checkpoint at `path` if one of its files is missing, has another size, or lies outside of it.

    Raises:
        CheckpointError: naming the file.
    """
    for name, size in files.items():
        if Path(name).name != name:
            raise CheckpointError(f"The checkpoint {path} is damaged: {name!r} is no file in it.")
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise damaged(path, error) from error
        if found != size:
            raise CheckpointError(f"The checkpoint {path} is damaged: {name} does not have its recorded size.")


def damaged(path: Path, error: Exception) -> CheckpointError:
    """Return the error that names the checkpoint at `path` and what went wrong."""
    return CheckpointError(f"The checkpoint {path} is damaged: {type(error).__name__} {error}.")


def _content(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((path / NAME).read_text(encoding="utf-8"))
        _ = int(content["format"]), dict(content["files"]), dict(content["tensors"]), dict(content["scalars"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, error) from error
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
