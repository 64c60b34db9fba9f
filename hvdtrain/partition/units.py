"""Layers that are computed as a whole, for this rank's rows: their operations are not looked at."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import mask_of, set_mask
from hvdtrain.compat.seams import LAYER, LAYER_REPLICAS
from hvdtrain.partition.kinds import Opaque, Rows
from hvdtrain.partition.partition import Partition


def is_unit(layer: Any) -> bool:
    """Return whether a layer is computed for each sample by itself, in ways that no rule follows.

    Recurrent layers of Keras, whose loops would be given whole tensors, and layers that exchange or take statistics of
    a rank's own samples by design. Layers that draw random numbers inside a loop are none.
    """
    if isinstance(layer, keras.layers.BatchNormalization) or type(layer).__module__.startswith("hvdtrain.layers."):
        return True
    if not isinstance(layer, keras.layers.RNN) or not type(layer).__module__.startswith("keras."):
        return False
    cells = getattr(layer.cell, "cells", [layer.cell])
    drawing = any(getattr(cell, name, 0) for cell in cells for name in ("dropout", "recurrent_dropout"))
    return not drawing and all(type(cell).__module__.startswith("keras.") for cell in cells)


@contextmanager
def within_units(partition: Partition) -> Iterator[None]:
    """Compute units as a whole, inside the context."""
    call = LAYER.active(keras.layers.Layer)

    def called(layer: Any, *args: Any, **options: Any) -> Any:
        if partition.is_plain or not is_unit(layer):
            return call(layer, *args, **options)
        given = [each for each in tf.nest.flatten((args, options)) if isinstance(each, tf.Tensor) and each.shape.rank]
        if not given or any(isinstance(partition.kind(each), Opaque) for each in given):
            return call(layer, *args, **options)
        partition.cause = f"{type(layer).__name__} {layer.name!r}"
        like = _rows_of(partition, given)

        def opened(each: Any) -> Any:
            if not isinstance(each, tf.Tensor) or not each.shape.rank:
                return each
            mask = mask_of(each)
            inner = partition.whole(each) if like is None else partition.opened(partition.rows(each, like))
            if mask is not None:
                set_mask(inner, opened(mask))
            return inner

        args, options = tf.nest.map_structure(opened, (args, options))
        if like is None:
            with LAYER_REPLICAS.replaced(layer, _no_replicas) if hasattr(layer, "replicas") else nullcontext():
                return call(layer, *args, **options)
        outputs = call(layer, *args, **options)

        def closed(each: Any) -> Any:
            if not isinstance(partition.kind(each), Opaque):
                return each
            outer, mask = partition.closed(each, like), mask_of(each)
            if mask is not None:
                set_mask(outer, closed(mask))
            return outer

        return tf.nest.map_structure(closed, outputs)

    with LAYER.replaced(keras.layers.Layer, called):
        yield


def _rows_of(partition: Partition, given: Sequence[tf.Tensor]) -> Rows | None:
    """Return how a unit's inputs are this rank's rows; None: they are whole, or have no samples in dim 0."""
    found = [kind for each in given if isinstance(kind := partition.kind(each), Rows)]
    if found:
        return found[0] if all(each.dim == 0 and each.aligned(found[0]) for each in found) else None
    is_batch = isinstance(partition.total, int) and all(each.shape[0] == partition.total for each in given)
    return Rows() if is_batch else None


def _no_replicas() -> None:
    """Return the collectives of a layer whose inputs all ranks have."""
