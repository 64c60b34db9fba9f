"""Batches that a user's Python makes train as the same samples in arrays do."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from checks.parity import SAMPLES, dense_data, dense_model, per_sample
from world import World, flat_bytes, moved, relative_error

import hvdtrain

BATCH = 16


class Batches(keras.utils.PyDataset):
    """Global batches of arrays, in their order."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.arrays = x, y

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __getitem__(self, number: int) -> tuple[np.ndarray, ...]:
        return tuple(array[number * BATCH : (number + 1) * BATCH] for array in self.arrays)


def check_batches_made_in_python(world: World) -> None:
    x, y = dense_data("float64")
    batches = Batches(x, y)

    def generate() -> Any:
        for number in range(len(batches)):
            yield batches[number]

    forms = {
        "arrays": ((x, y), {"batch": BATCH}),
        "dataset": (tf.data.Dataset.from_tensor_slices((x, y)), {"batch": BATCH}),
        "PyDataset": (batches, {}),
        "generator": (generate, {}),
    }
    trained = {}
    for name, (data, options) in forms.items():
        trainer = hvdtrain.Trainer(
            dense_model("float64", world.rank), keras.optimizers.SGD(0.1), per_sample, backend=world.backend
        )
        trainer.fit(data, epochs=2, shuffle=False, verbose=False, **options)
        loss = trainer.evaluate(data if "batch" not in options else (x, y), batch=BATCH).loss
        assert world.same_everywhere(flat_bytes(trainer.model.get_weights())), name
        trained[name] = trainer.model.get_weights(), loss
    weights, loss = trained["arrays"]
    assert moved(weights, dense_model("float64", 0).get_weights()) > 1e-2
    for name, (other, other_loss) in trained.items():
        assert relative_error(other, weights) <= 1e-9, name
        np.testing.assert_allclose(other_loss, loss, rtol=1e-6, err_msg=name)
