"""Layers that are computed as a whole, for this rank's rows: their operations are not looked at."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import mask_of, set_mask
from hvdtrain.compat.replaced import active, replaced
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
    call = active(keras.layers.Layer, "__call__")

    def called(layer: Any, *args: Any, **options: Any) -> Any:
        if partition.is_plain or not is_unit(layer):
            return call(layer, *args, **options)
        given = tf.nest.flatten((args, options))
        kinds = [partition.kind(each) for each in given]
        if any(isinstance(kind, Opaque) for kind in kinds) or not any(
            isinstance(each, tf.Tensor) and each.shape.rank for each in given
        ):
            return call(layer, *args, **options)
        partition.cause = f"{type(layer).__name__} {layer.name!r}"

        def opened(each: Any) -> Any:
            if not isinstance(each, tf.Tensor) or not each.shape.rank:
                return each
            mask = mask_of(each)
            inner = partition.opened(partition.rows(each, Rows()))
            if mask is not None:
                set_mask(inner, opened(mask))
            return inner

        args, options = tf.nest.map_structure(opened, (args, options))
        outputs = call(layer, *args, **options)

        def closed(each: Any) -> Any:
            if not isinstance(partition.kind(each), Opaque):
                return each
            outer, mask = partition.closed(each, Rows()), mask_of(each)
            if mask is not None:
                set_mask(outer, closed(mask))
            return outer

        return tf.nest.map_structure(closed, outputs)

    with replaced(keras.layers.Layer, "__call__", called):
        yield
