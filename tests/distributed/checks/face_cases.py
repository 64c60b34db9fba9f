"""Models, data and training loops of the checks of Horovod's face, on whichever Keras tf.keras is in this process."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from world import World, flat_bytes, relative_error

import hvdtrain.horovod as hvd
import hvdtrain.horovod.keras as hvd_keras

keras = tf.keras
STEPS, BATCH = 20, 8
TOLERANCE = 1e-9  # float64
IS_LEGACY = keras.Model.__module__.startswith("tf_keras.")
SGDS = [keras.optimizers.SGD, *([keras.optimizers.legacy.SGD] if IS_LEGACY else [])]


def momentum() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def legacy_momentum() -> Any:
    return keras.optimizers.legacy.SGD(0.05, momentum=0.9)


def legacy_adam() -> Any:
    return keras.optimizers.legacy.Adam(0.01)


def momentum_of_sums() -> Any:
    """Return what `momentum` with the sum of two gradients is with their average."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


MOMENTA = [momentum, legacy_momentum] if IS_LEGACY else [momentum]


def mean_square(targets: Any, outputs: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.square(outputs - tf.cast(targets, outputs.dtype)))


def weights_of(model: Any) -> list[np.ndarray]:
    return [np.array(weight) for weight in model.get_weights()]


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


def alone(make: Callable[[], Any], size: int = BATCH) -> list[np.ndarray]:
    """One process, whole batches, nothing of Horovod."""
    model, optimizer = model_of(), make()
    for x, y in batches(size):
        with tf.GradientTape() as tape:
            loss = mean_square(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(dense, model.trainable_variables, strict=True))
    return weights_of(model)


def in_fit(world: World, optimizer: Any, callbacks: Sequence[Any] = ()) -> list[np.ndarray]:
    model = model_of(seed=7 + world.rank)  # the callback makes them alike
    callbacks = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
    keras.backend.set_floatx("float64")  # Keras computes losses in this type
    try:
        model.compile(optimizer, mean_square)
        model.fit(dataset(world), verbose=0, shuffle=False, callbacks=callbacks)
    finally:
        keras.backend.set_floatx("float32")
    return weights_of(model)


def in_own_loop(
    world: World, optimizer: Any, way: str = "apply_gradients", *, compiled: bool = True
) -> list[np.ndarray]:
    model = model_of()
    variables = model.trainable_variables

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = mean_square(y, model(x, training=True))
        if way == "minimize":
            optimizer.minimize(loss, variables, tape=tape)
        elif way == "compute_gradients":
            optimizer.apply_gradients(optimizer.compute_gradients(loss, variables, tape))
        else:
            recorded = hvd.DistributedGradientTape(tape) if way == "tape" else tape
            gradients = recorded.gradient(loss, variables)
            if way == "apply":
                optimizer.apply(gradients, variables)
            else:
                optimizer.apply_gradients(zip(gradients, variables, strict=True))

    call = tf.function(step, reduce_retracing=True) if compiled else step
    for batch in batches():
        x, y = part(world, batch)
        call(tf.constant(x), tf.constant(y))
    return weights_of(model)


def agree(world: World, weights: list[np.ndarray], reference: list[np.ndarray], tolerance: float = TOLERANCE) -> None:
    assert max(float(np.abs(w - s).max()) for w, s in zip(weights, weights_of(model_of()), strict=True)) > 1e-2
    error = relative_error(weights, reference)
    assert error <= tolerance, error
    assert world.same_everywhere(flat_bytes(weights))
