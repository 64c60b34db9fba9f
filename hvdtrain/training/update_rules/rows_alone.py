"""Whether an optimizer updates rows of a table alone: what can be kept on servers by rows, and looked up by rows."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras_variables import set_decayed, updating_at
from hvdtrain.compat.tensorflow import eager_variables
from hvdtrain.optim.averaging import innermost
from hvdtrain.state.lent_optimizer import without_slots


def changes_rows_alone(optimizer: Any, *, decayed: bool = True) -> bool:
    """Return whether an update by rows of a table leaves all other rows as they were, as a trial shows.

    Momentum and weight decay, if the table is `decayed`, move every row in every update, and averages those that have
    moved more than once. The trial is at a rate of 1: that of now may be 0, as where it warms up.
    """
    inner = innermost(optimizer)
    if (inner.use_ema and inner.ema_overwrite_frequency) or getattr(inner, "optimizers", ()):
        return False  # one of several optimizers may update the table
    with eager_variables(), without_slots(inner):
        table = keras.Variable(np.ones((4, 2), np.float32), trainable=True)
        inner.build([table])
        set_decayed(inner, table, decayed)
        with updating_at(inner, keras.Variable(0, dtype="int64", trainable=False), tf.constant(1.0)):
            return _changes_rows_alone(inner, table)


def _changes_rows_alone(optimizer: Any, table: Any) -> bool:
    for row in (0, 0, 1, 0, 2, 2, 1, 3):
        before = np.array(table)
        optimizer.apply([tf.IndexedSlices(tf.ones([1, 2]), tf.constant([row]), tf.constant([4, 2]))], [table])
        if not np.array_equal(np.delete(before, row, 0), np.delete(np.array(table), row, 0)):
            return False
    return True
