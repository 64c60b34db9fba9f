"""Checkpoints of format 1, which TensorFlow wrote: whole tensors by Keras' own paths."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint import manifest
from hvdtrain.checkpoint.manifest import StoredTensor
from hvdtrain.runtime.placement import Region
from hvdtrain.state.named_tensors import values_in

_TENSORS = "tensors"


class EarlierReader:
    """Reads a checkpoint of format 1; see `SliceReader`.

    Its names hold numbers that Keras gives layers over all models of a process. Where they are others by now, the
    tensors are taken in their order, which is that of the model's weights and then of the optimizer's.

    Args:
        path: the checkpoint's folder.
        names: what the tensors would be called today, by structural path and in that order.

    Raises:
        CheckpointError: it is damaged.
    """

    def __init__(self, path: Path, names: Mapping[str, str]) -> None:
        self._path = path
        content: dict[str, Any] = json.loads((path / manifest.NAME).read_text(encoding="utf-8"))
        manifest.check_sizes(path, content["files"])
        self.scalars: dict[str, Any] = content["scalars"]
        self.checksum = "format 1"
        """No other rank reads this format: the primary sends the slices."""
        saved: dict[str, Any] = content["tensors"]
        self._names = _matched(list(saved), names)
        self.tensors = {
            structural: StoredTensor(saved[name][0], tuple(saved[name][1]), ())
            for structural, name in self._names.items()
        }
        try:
            self._reader = tf.train.load_checkpoint(str(path / _TENSORS))
        except (tf.errors.OpError, ValueError, RuntimeError) as error:
            raise manifest.damaged(path, error) from error

    def read(self, path: str, global_shape: tuple[int, ...], region: Region) -> np.ndarray:
        """Return what `region` is of a tensor of `global_shape`."""
        name = self._names[path].replace(".", "..").replace("/", ".S")
        try:
            whole = np.asarray(self._reader.get_tensor(f"variables/{name}/.ATTRIBUTES/VARIABLE_VALUE"))
        except (tf.errors.OpError, ValueError, RuntimeError) as error:
            raise manifest.damaged(self._path, error) from error
        return values_in(whole.reshape(global_shape), region)

    def verify(self) -> None:
        """Read every tensor, which TensorFlow compares with its checksum.

        Raises:
            CheckpointError: one is damaged.
        """
        try:
            for name in self._reader.get_variable_to_shape_map():
                self._reader.get_tensor(name)
        except (tf.errors.OpError, ValueError, RuntimeError) as error:
            raise manifest.damaged(self._path, error) from error


def _matched(saved: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the saved name of each structural path; a saved tensor that belongs to none keeps its name."""
    if set(saved) == set(names.values()):
        return dict(names)
    paths = list(names)
    return {paths[place] if place < len(paths) else name: name for place, name in enumerate(saved)}
