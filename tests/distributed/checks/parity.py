"""Training on all ranks is training on one: the same weights after 20 steps, with an uneven tail."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from builders import (
    BATCH,
    CROSS_ENTROPY,
    EPOCHS,
    MODELS,
    OPTIMIZERS,
    SAMPLES,
    TOLERANCE,
    dense_data,
    dense_model,
    per_sample,
    trained_alone,
)
from world import World, exact_arrays, flat_bytes, grappler, moved, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import DesyncError


def train(
    world: World, model: keras.Model, optimizer: Any, data: tuple[np.ndarray, ...], backend: Any = None, **options: Any
) -> Any:
    trainer = hvdtrain.Trainer(model, optimizer, CROSS_ENTROPY, backend=backend or world.backend, **options)
    # Measuring each step saves a graph, and half a second.
    trainer.fit(data, batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False, log_every=1 if options else 10)
    return trainer


@exact_arrays()
def parity_error(
    world: World, kind: str, optimizer: str, dtype: str, *, backend: Any = None, drop: int = 0, **options: Any
) -> float:
    """Train on all ranks, compare with one process, and return the relative error (on every rank)."""
    build, data = MODELS[kind]
    x, y = data(dtype)
    kept = (np.delete(x, range(drop), axis=0), np.delete(y, range(drop), axis=0)) if drop else (x, y)
    # Each rank starts from values of its own: the broadcast must undo that.
    trainer = train(world, build(dtype, seed=world.rank), OPTIMIZERS[optimizer](), kept, backend, **options)
    weights = trainer.model.get_weights()
    if not isinstance(backend, Sabotaged):
        assert world.same_everywhere(flat_bytes(weights)), "the ranks' weights differ"
    return relative_error(weights, world.reference(trained_alone, kind, optimizer, dtype))


def assert_parity(world: World, kind: str, optimizer: str, dtype: str, **options: Any) -> None:
    error = parity_error(world, kind, optimizer, dtype, **options)
    assert error <= TOLERANCE[dtype], f"{kind} {optimizer} {dtype} {options}: {error:.2e}"


@worlds("mpirun-2", "gloo-2", "gloo-4")
@worlds("gloo-1", "mpirun-4", extended=True)
@grappler()
def check_dense_sgd_float64(world: World) -> None:
    assert_parity(world, "dense", "sgd", "float64")


@worlds("mpirun-2", extended=True)
def check_dense_sgd_float32(world: World) -> None:
    assert_parity(world, "dense", "sgd", "float32")


@worlds("mpirun-2", extended=True)
def check_dense_adam_float64(world: World) -> None:
    assert_parity(world, "dense", "adam", "float64")


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
def check_dense_adam_float32(world: World) -> None:
    assert_parity(world, "dense", "adam", "float32")


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
def check_embedding_sgd_float64(world: World) -> None:
    assert_parity(world, "embedding", "sgd", "float64")


@worlds("mpirun-2", extended=True)
def check_embedding_sgd_float32(world: World) -> None:
    assert_parity(world, "embedding", "sgd", "float32")


@worlds("mpirun-2", extended=True)
def check_embedding_adam_float64(world: World) -> None:
    assert_parity(world, "embedding", "adam", "float64")


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-1", "gloo-4", "mpirun-4", extended=True)
@grappler()
def check_embedding_adam_float32(world: World) -> None:
    assert_parity(world, "embedding", "adam", "float32")


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-1", "gloo-4", extended=True)
@exact_arrays()
def check_batches_with_fewer_samples_than_ranks(world: World) -> None:
    """Ranks without a sample hold one that does not count, at the end of every epoch."""
    x, y = (array[:18] for array in dense_data("float64"))
    model = dense_model("float64", world.rank)
    trainer = train(world, model, OPTIMIZERS["adam"](), (x, y))
    assert trainer.state.scalars.step == 2 * EPOCHS
    reference = dense_model("float64", 0)
    batches = [(x[:16], y[:16]), (x[16:], y[16:])] * EPOCHS
    expected = plain_training(reference, OPTIMIZERS["adam"](), per_sample, batches)
    error = relative_error(model.get_weights(), expected)
    assert error <= TOLERANCE["float64"], f"{error:.2e}"


class Sabotaged:
    """A backend whose gradients are not reduced, or reduced twice as large."""

    def __init__(self, backend: Any, factor: float | None) -> None:
        self._backend = backend
        self._factor = factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def all_reduce(self, tensor: tf.Tensor, *, name: str, **options: Any) -> tf.Tensor:
        if not name.startswith("gradient/"):
            return self._backend.all_reduce(tensor, name=name, **options)
        if self._factor is None:
            return tensor
        return self._factor * self._backend.all_reduce(tensor, name=name, **options)


def check_parity_fails_without_reduction(world: World) -> None:
    try:
        parity_error(world, "dense", "sgd", "float32", backend=Sabotaged(world.backend, None))
    except DesyncError as error:
        assert "After step 1 " in str(error), error
    else:
        raise AssertionError("ranks that drift apart went unnoticed")


def check_parity_fails_with_doubled_reduction(world: World) -> None:
    error = parity_error(world, "dense", "sgd", "float32", backend=Sabotaged(world.backend, 2.0))
    assert error > 1e3 * TOLERANCE["float32"], f"the comparison did not notice: {error:.2e}"


def check_parity_fails_when_a_sample_is_dropped(world: World) -> None:
    error = parity_error(world, "dense", "sgd", "float32", drop=1)
    assert error > 1e3 * TOLERANCE["float32"], f"the comparison did not notice: {error:.2e}"


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
def check_sample_weights_and_masks(world: World) -> None:
    """A loss that is divided by the sum of the weights, which differs by rank, and masked positions."""
    rng = np.random.default_rng(5)
    x = rng.integers(0, 9, (SAMPLES, 7)).astype("int32")
    x[:, 3:] *= rng.random((SAMPLES, 4)) < 0.5  # zeros are masked
    y = rng.integers(0, 3, (SAMPLES, 7))
    w = rng.random(SAMPLES).astype("float32")

    def build(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        tokens = keras.Input((7,), dtype="int32")
        hidden = keras.layers.Embedding(9, 6, mask_zero=True)(tokens)
        return keras.Model(tokens, keras.layers.Dense(3)(hidden))

    for reduction in ("sum_over_batch_size", "mean_with_sample_weight"):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        trainer = hvdtrain.Trainer(build(world.rank), keras.optimizers.SGD(0.5), loss, backend=world.backend)
        trainer.fit((x, y, w[:, None]), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False)
        reference = build(0)
        start = [np.array(v) for v in reference.get_weights()]
        weighted = lambda targets, outputs: loss(targets[0], outputs, sample_weight=targets[1])  # noqa: B023, E731
        batches = [(x[i : i + BATCH], (y[i : i + BATCH], w[i : i + BATCH, None])) for i in range(0, SAMPLES, BATCH)]
        plain_training(reference, keras.optimizers.SGD(0.5), weighted, batches * EPOCHS)
        assert moved(reference.get_weights(), start) >= 1e-2
        error = relative_error(trainer.model.get_weights(), reference.get_weights())
        assert error <= TOLERANCE["float32"], f"{reduction}: {error:.2e}"
