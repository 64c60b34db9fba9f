"""Slices of tensors in the files of a checkpoint, put together as they are asked for."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint.dtypes import numpy_dtype
from hvdtrain.checkpoint.manifest import Manifest, StoredSlice, StoredTensor, read_manifest
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.placement import Box, Region, box_shape, boxes_of, whole_box
from hvdtrain.state.named_tensors import elements, values_in


class SliceReader:
    """Reads the tensors of a checkpoint, whatever number of ranks wrote them.

    Args:
        path: the checkpoint's folder.

    Raises:
        CheckpointError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._manifest: Manifest = read_manifest(path)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What there is, by path."""
        return self._manifest.tensors

    @property
    def checksum(self) -> str:
        """The manifest's checksum, which tells this checkpoint from others of its name."""
        return self._manifest.checksum

    @property
    def scalars(self) -> dict[str, object]:
        """The scalars that were saved."""
        return dict(self._manifest.scalars)

    def read(self, path: str, global_shape: tuple[int, ...], region: Region) -> np.ndarray:
        """Return what `region` is of a tensor of `global_shape`.

        A tensor that was stored flat, in row-major order, can be read in any shape, and the other way round.

        Raises:
            CheckpointError: the bytes are not those that were written.
        """
        stored = self.tensors[path]
        if stored.global_shape == global_shape:
            return self._put_together(path, stored, region)
        whole = self._assembled(path, stored, whole_box(stored.global_shape))
        return values_in(whole.reshape(global_shape), region)

    def _put_together(self, path: str, stored: StoredTensor, region: Region) -> np.ndarray:
        """Return the boxes that `region` consists of, side by side."""
        boxes = list(boxes_of(region))
        if len(boxes) == 1:
            return self._assembled(path, stored, boxes[0][0])
        result = np.empty(box_shape(region), numpy_dtype(stored.dtype))
        for box, place in boxes:
            result[place] = self._assembled(path, stored, box)
        return result

    def _assembled(self, path: str, stored: StoredTensor, box: Box) -> np.ndarray:
        """Return `box`, put together from the slices that overlap with it."""
        for part in stored.slices:
            if part.box == box:
                return self._part(path, stored.dtype, part)
        result = np.empty(box_shape(box), numpy_dtype(stored.dtype))
        for part in stored.slices:
            overlap = tuple(
                slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(part.box, box, strict=True)
            )
            if elements(box_shape(overlap)):
                result[_within(overlap, box)] = self._part(path, stored.dtype, part)[_within(overlap, part.box)]
        return result

    def _part(self, path: str, dtype: str, part: StoredSlice) -> np.ndarray:
        shape, kind = box_shape(part.box), numpy_dtype(dtype)
        count = elements(shape) * kind.itemsize
        try:
            content = np.fromfile(self._path / part.file, np.uint8, count, offset=part.offset)
        except OSError as error:
            raise CheckpointError(f"The checkpoint {self._path} cannot be read: {error}") from error
        if hashlib.sha256(content.data).hexdigest() != part.sha256:
            raise other_bytes(self._path, path, part)
        return content.view(kind).reshape(shape)


def other_bytes(checkpoint: Path, path: str, part: StoredSlice) -> CheckpointError:
    """Return the error that names the slice of the tensor `path` whose bytes have changed."""
    return CheckpointError(
        f"The checkpoint {checkpoint} is damaged: in {part.file} the bytes of {path} are not those that were written."
    )


def _within(box: Box, outer: Box) -> Box:
    """Return the slice of `outer` that `box` is."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))
