"""Sums over replicas and stages, for figures that the last stage of a pipeline counts."""

from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives


class FiguresBackend:
    """A backend whose sums go over the stages of each replica too; the other stages count zero.

    Args:
        backend: the replicas.
        pipeline: collectives of all stages of this replica.
        counts: whether this rank has the last stage, and its own figures.
    """

    def __init__(self, backend: Backend, pipeline: Collectives, *, counts: bool) -> None:
        self._backend = backend
        self._pipeline = pipeline
        self.counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def all_reduce(self, tensor: tf.Tensor, *, name: str, **options: Any) -> tf.Tensor:
        """Sum elementwise over the replicas, then over the stages."""
        mine = self._backend.all_reduce(tensor, name=name, **options)
        return self._pipeline.all_reduce(mine, name=name)
