"""What is looked up in tables: rows alone where rows alone are updated, else the whole, which is not copied then."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.training.trainer import Trainer


class Looking(keras.Model):
    """Notes which operations the lookups of each of its traces take."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(50, 4)
        self.bias = keras.layers.Embedding(50, 1)
        self.seen = []

    def call(self, x):
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        found = self.table(x) + self.bias(x)
        self.seen.append({op.type for op in graph.get_operations()[before:]})
        return found


def looked_up(optimizer, **options):
    """Return the operations that lookups take in a step, of which traces of shapes alone come before."""
    model = Looking()
    model.compile(optimizer, "mse")
    trainer = Trainer(model, **options)
    before = np.array(model.predict(np.arange(8).reshape(4, 2), verbose=0))
    trainer.fit(np.arange(8).reshape(4, 2), np.ones((4, 2, 4), "float32"), batch=4, epochs=3, verbose=0)
    assert np.abs(model.predict(np.arange(8).reshape(4, 2), verbose=0) - before).min() > 0
    return model.seen[-1] & {"GatherV2", "ResourceGather"}


class Own(keras.optimizers.SGD):
    """Takes dense gradients alone, as those of small tables are."""

    def update_step(self, gradient, variable, learning_rate):
        assert not isinstance(gradient, tf.IndexedSlices)
        super().update_step(gradient, variable, learning_rate)


SEVERAL = hasattr(keras.optimizers, "MultiOptimizer")


def several():
    kinds = keras.optimizers
    return kinds.MultiOptimizer(kinds.OptimizerMap(kinds.SGD(0.1), {".*/bias": kinds.Adam(0.1)})) if SEVERAL else None


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    ("optimizer", "options", "rows"),
    [
        (keras.optimizers.SGD(0.1), {}, True),
        (keras.optimizers.RMSprop(0.1), {}, True),
        (keras.optimizers.SGD(0.1), {"accumulate": 2}, True),
        (keras.optimizers.SGD(0.1), {"on_bad_step": "skip"}, True),
        (keras.optimizers.SGD(0.1), {"sparse_gradients": "dense"}, False),
        (keras.optimizers.SGD(0.1, momentum=0.9), {}, False),
        (keras.optimizers.SGD(0.1, weight_decay=0.1), {}, False),
        (keras.optimizers.Adam(0.1), {}, False),
        (Own(0.1), {}, False),
        pytest.param(several(), {}, False, marks=pytest.mark.skipif(not SEVERAL, reason="no MultiOptimizer")),
    ],
)
def test_rows_are_looked_up_where_rows_are_updated(optimizer, options, rows):
    assert looked_up(optimizer, **options) == {"ResourceGather" if rows else "GatherV2"}
