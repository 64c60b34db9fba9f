"""Model and data of the checks of Horovod's face, on whichever Keras tf.keras is in this process."""

from typing import Any

import numpy as np
import tensorflow as tf
from world import World

import hvdtrain.horovod.keras as hvd_keras

keras = tf.keras
STEPS, BATCH = 20, 8
TOLERANCE = 1e-9  # float64


def model_of(seed: int = 7, dtype: str = "float64") -> Any:
    """Two inputs' worth of gradients: an embedding's rows, and dense ones."""
    keras.utils.set_random_seed(seed)
    layers: list[Any] = [
        keras.Input((3,), dtype="int32"),
        keras.layers.Embedding(5, 4, dtype=dtype, name="table"),
        keras.layers.Flatten(dtype=dtype),
        keras.layers.Dense(6, activation="tanh", dtype=dtype, name="hidden"),
        keras.layers.Dense(1, dtype=dtype, name="out"),
    ]
    return keras.Sequential(layers)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 5, (STEPS * BATCH, 3)).astype("int32"), rng.standard_normal((STEPS * BATCH, 1))


def batches(size: int = BATCH) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = data()
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def part(world: World, batch: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """This rank's share of a batch."""
    return batch[0][world.rank :: world.size], batch[1][world.rank :: world.size]


def dataset(world: World) -> tf.data.Dataset:
    parts = [part(world, batch) for batch in batches()]
    x, y = (np.concatenate([each[i] for each in parts]) for i in (0, 1))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH // world.size)


def leaves_local_variables(world: World, optimizer: Any, loss: Any) -> None:
    """The callback sends the last rank's variables to all, but for one that is every rank's own."""
    model = model_of(seed=world.rank)
    own = model.get_layer("out").kernel
    before = own.numpy()
    model.compile(optimizer, loss)
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(world.size - 1, local_variables=[own])
    x, y = part(world, batches()[0])
    model.fit(x, y, verbose=0, callbacks=[callback])
    np.testing.assert_array_equal(own.numpy(), before)
    expected = model_of(seed=world.size - 1)
    np.testing.assert_array_equal(model.get_layer("table").embeddings.numpy(), expected.get_weights()[0])
