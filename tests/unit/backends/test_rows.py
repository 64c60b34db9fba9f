"""Embeddings are looked up by rows: a table is not read as a whole, which TensorFlow copies."""

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


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_a_table_is_looked_up_by_rows(call):
    model = Looking()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = np.arange(8).reshape(4, 2), np.ones((4, 2, 4), "float32")
    model.predict(x, verbose=0)
    assert "GatherV2" in model.seen[-1], "so does Keras"
    trainer = Trainer(model)
    trainer.predict(x) if call == "predict" else getattr(trainer, call)(x, y, batch=4, verbose=0)
    assert "ResourceGather" in model.seen[-1], "traces of shapes alone come before"
    assert "GatherV2" not in model.seen[-1]
