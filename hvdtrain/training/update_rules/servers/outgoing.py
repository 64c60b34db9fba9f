"""Gradients on their way from the compiled step to the messages."""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.gradients.reduction import Gradient
from hvdtrain.training.update_rules.servers.layout import ServerLayout


class Outgoing:
    """A worker's gradients for one server, from the compiled step to the messages."""

    def __init__(self, layout: ServerLayout) -> None:
        self._flats = [tf.Variable(np.zeros_like(flat), trainable=False) for flat in layout.flat_buffers(layout.dense)]
        self._rows = [
            (
                tf.Variable(np.zeros(0, np.int64), shape=[None], trainable=False),
                tf.Variable(np.zeros((0, *e.shape[1:]), e.dtype), shape=[None, *e.shape[1:]], trainable=False),
            )
            for e in layout.sparse
        ]

    def keep(self, layout: ServerLayout, gradients: Mapping[str, Gradient]) -> None:
        """Keep a step's gradients, by path."""
        for kept, flat in zip(self._flats, layout.flat(layout.dense, gradients), strict=True):
            kept.assign(flat)
        for entry, (indices, values) in zip(layout.sparse, self._rows, strict=True):
            indices.assign(tf.cast(gradients[entry.path].indices, tf.int64))
            values.assign(gradients[entry.path].values)

    def read(self) -> list[tf.Tensor]:
        """Return them as tensors, in a compiled function."""
        return [each.read_value() for each in (*self._flats, *(each for pair in self._rows for each in pair))]

    def arrays(self, tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
        """Return the result of `read` as it travels."""
        arrays = [each.numpy() for each in tensors]
        flats, rows = arrays[: len(self._flats)], arrays[len(self._flats) :]
        counts = [np.array([len(indices) for indices in rows[::2]])] if rows else []
        return [*flats, *counts, *rows]
