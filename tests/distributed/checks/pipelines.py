"""A model whose layers are on several ranks trains as one process does."""

import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from builders import BATCH, CROSS_ENTROPY, EPOCHS, OPTIMIZERS, SAMPLES, TOLERANCE, assert_moved, per_sample
from meshes import on_mesh
from world import World, computing_in, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.compat.keras_variables import average_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.optim.averaging import innermost

LENGTH, VOCABULARY = 5, 11


def model_of(dtype: str, *, tied: bool = False, dropout: float = 0.0) -> keras.Model:
    """Two residual blocks between an embedding and an output layer, which may be the embedding again."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    embedding = layers.Embedding(VOCABULARY, 8, dtype=dtype, name="embedding")
    x = embedding(tokens)
    for number in range(4):
        y = layers.LayerNormalization(dtype=dtype, name=f"norm{number}")(x)
        y = layers.Dense(8, activation="tanh", dtype=dtype, name=f"dense{number}")(y)
        if dropout:
            y = layers.Dropout(dropout, seed=number, dtype=dtype, name=f"dropout{number}")(y)
        x = layers.Add(dtype=dtype, name=f"add{number}")([x, y])
    if tied:
        outputs = TiedHead(embedding, dtype=dtype, name="head")(x)
    else:
        outputs = layers.Dense(VOCABULARY, dtype=dtype, name="head")(x)
    return keras.Model(tokens, outputs)


class TiedHead(keras.layers.Layer):
    """Logits by the transposed embedding, as GPT-2's."""

    def __init__(self, embedding: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))

    def compute_output_shape(self, shape: Any) -> Any:
        return (*shape[:-1], VOCABULARY)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    x = rng.integers(0, VOCABULARY, (SAMPLES, LENGTH)).astype("int32")
    return x, (x + 1) % VOCABULARY


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = data()
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)] * EPOCHS


def trained(
    mesh: World, model: Any, optimizer: Any, loss: Any = CROSS_ENTROPY, *, epochs: int = EPOCHS, **options: Any
) -> Any:
    options = {"accumulate": 4, **options}
    trainer = hvdtrain.Trainer(model, optimizer, loss, ["accuracy"], backend=mesh.backend, **options)
    trainer.fit(data(), batch=BATCH, epochs=epochs, shuffle=False, verbose=False, log_every=1)
    return trainer


def error_of(mesh: World, trainer: Any, expected: Sequence[np.ndarray], model: keras.Model) -> float:
    """Compare this rank's weights with those of the same paths in one process's model; the largest of all ranks."""
    from hvdtrain.state.structure import structure_of

    whole = dict(zip(structure_of(model).by_path(model.weights), expected, strict=True))
    mine = trainer.state._structure.by_path(trainer.model.weights)
    error = relative_error([v.numpy() for v in mine.values()], [whole[path] for path in mine])
    held = [text.decode().split() for text in mesh.gather(" ".join(mine).encode())]
    assert set().union(*held) == set(whole), "a weight is on no rank"
    assert min(map(len, held)) < len(whole), "every rank holds the whole model"
    return max(float(text) for text in mesh.gather(str(error).encode()))


def trained_alone(dtype: str, optimizer: str, tied: bool, clip_norm: float | None) -> list[np.ndarray]:
    model = model_of(dtype, tied=tied)
    start = [np.array(w) for w in model.get_weights()]
    clip = lambda gradients: tf.clip_by_global_norm(gradients, clip_norm)[0] if clip_norm else gradients  # noqa: E731
    weights = plain_training(model, OPTIMIZERS[optimizer](), per_sample, batches(), clip)
    assert_moved(weights, start)
    return weights


def assert_parity(mesh: World, dtype: str, optimizer: str, *, tied: bool = False, **options: Any) -> Any:
    """Return the trainer, which has trained as one process does."""
    trainer = trained(mesh, partial(model_of, dtype, tied=tied), OPTIMIZERS[optimizer](), **options)
    expected = mesh.reference(trained_alone, dtype, optimizer, tied, options.get("clip_norm"))
    error = error_of(mesh, trainer, expected, model_of(dtype, tied=tied))
    assert error <= TOLERANCE[dtype], f"{dtype} {optimizer} tied: {tied} {options}: {error:.2e}"
    return trainer


@computing_in("float64")
def check_stages_train_as_one_process_does(world: World) -> None:
    with on_mesh(world, "pp=2") as mesh:
        assert_parity(mesh, "float64", "adam")


@worlds("mpirun-2", extended=True)
def check_every_schedule_trains_as_one_process_does(world: World) -> None:
    with on_mesh(world, "pp=2") as mesh:
        assert_parity(mesh, "float32", "sgd", pipeline_schedule="gpipe", recompute=True)
        assert_parity(mesh, "float64", "sgd", pipeline_schedule="interleaved", virtual_stages=2, accumulate=2)


@worlds("mpirun-2", extended=True)
def check_tied_weights_and_clipping_by_the_norm_of_all_stages(world: World) -> None:
    with on_mesh(world, "pp=2") as mesh:
        # The last stage has no weight but the tied one, whose gradient counts on the first.
        assert_parity(mesh, "float64", "sgd", tied=True, clip_norm=0.05, pipeline_stages=("head",))


@worlds("mpirun-2", extended=True)
def check_figures_are_those_of_one_process(world: World) -> None:
    """Loss and metrics of training, evaluation and prediction, with regularizers, masks, weights and dropout.

    The evaluation is that of averages of the weights.
    """
    from hvdtrain.backends.single import SingleBackend

    x, y = data()
    weights = np.linspace(0.5, 1.5, SAMPLES).astype("float32")[:, np.newaxis]
    runs = []
    with on_mesh(world, "pp=2") as mesh:
        for backend in (mesh.backend, SingleBackend(None)):
            model = regularized_model()
            before = hvdtrain.Trainer(model, backend=backend).predict(x[:7], batch=3)  # not compiled
            trainer = hvdtrain.Trainer(
                model,
                keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
                "sparse_categorical_crossentropy",
                ["accuracy"],
                backend=backend,
                accumulate=4,
                seed=5,
            )
            result = trainer.fit(
                (x, y, weights), batch=BATCH, epochs=2, verbose=False, validation_data=(x[:50], y[:50])
            )
            outputs = trainer.predict(x[:7], batch=3)
            runs.append((result.history, before, outputs))
        (ours, initial, predicted), (plain, expected_at_first, expected) = runs
        assert ours.keys() == plain.keys(), (ours, plain)
        for name, values in ours.items():
            assert np.allclose(values, plain[name], rtol=1e-6), (name, values, plain[name])
        assert np.allclose(initial, expected_at_first, rtol=1e-5, atol=1e-7)
        assert np.allclose(predicted, expected, rtol=1e-5, atol=1e-7)
        assert mesh.session.gather(predicted.tobytes(), 60.0) == [predicted.tobytes()] * world.size


def regularized_model() -> keras.Model:
    """Masked tokens, dropout, batch statistics, penalties on weights of both stages."""
    keras.utils.set_random_seed(1)
    layers, penalty = keras.layers, keras.regularizers.L2(0.01)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 8, mask_zero=True, embeddings_regularizer=penalty)(tokens)
    x = layers.Dropout(0.2, seed=3)(x)
    x = layers.Dense(8, activation="relu")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Dropout(0.2, seed=4)(x)
    return keras.Model(tokens, layers.Dense(VOCABULARY, activation="softmax", kernel_regularizer=penalty)(x))


@worlds("mpirun-2", extended=True)
def check_training_goes_wrong_without_one_of_the_messages(world: World) -> None:
    """A gradient that is not passed on is noticed by the comparison, and so is one activation of many."""
    from unittest.mock import patch

    from hvdtrain.parallel.pipeline.exchange import StageExchange

    receive = StageExchange.receive
    for lost, microbatch in (("backward", "2"), ("forward", "3")):

        def drop(self: Any, specs: Any, rows: Any, stage: int, label: str, direction: str) -> Any:
            came = receive(self, specs, rows, stage, label, direction)
            return [0.0 * t for t in came] if (direction, label) == (lost, microbatch) else came  # noqa: B023

        with on_mesh(world, "pp=2") as mesh, patch.object(StageExchange, "receive", drop):
            trainer = trained(mesh, model_of("float64"), OPTIMIZERS["sgd"](), epochs=1)
            plain = model_of("float64")
            expected = plain_training(plain, OPTIMIZERS["sgd"](), per_sample, batches()[: -(-SAMPLES // BATCH)])
            error = error_of(mesh, trainer, expected, plain)
            assert error > 1e-3, f"{lost}: {error:.2e}"


@worlds("mpirun-2", extended=True)
def check_a_bad_step_is_skipped_by_all_stages(world: World) -> None:
    """The last stage alone sees a loss that is not finite, and the first one alone a gradient that is not."""
    x, y = data()
    weights = np.ones((SAMPLES, 1))
    weights[20] = np.inf  # in the second batch
    with on_mesh(world, "pp=2") as mesh:
        model = model_of("float64")
        trainer = hvdtrain.Trainer(
            model, OPTIMIZERS["sgd"](), "sparse_categorical_crossentropy", backend=mesh.backend,
            on_bad_step="skip",
        )  # fmt: skip
        result = trainer.fit((x, y, weights), batch=BATCH, epochs=1, shuffle=False, verbose=False)
        assert result.bad_steps["non_finite"] == 1, result.bad_steps
        assert all(np.isfinite(weight).all() for weight in trainer.model.get_weights())


class OverflowingBehind(keras.layers.Layer):
    """Passes on what it is given. The gradient in front of it overflows with a sample whose first feature is large."""

    def call(self, tensors: Any) -> Any:
        x, features = tensors

        @tf.custom_gradient
        def passed(x: tf.Tensor) -> Any:
            overflow = tf.where(tf.abs(features[:, :1]) > 100, tf.constant(np.inf, x.dtype), tf.ones([], x.dtype))
            return tf.identity(x), lambda dy: dy * overflow

        return passed(x)

    def compute_output_shape(self, shapes: Any) -> Any:
        return shapes[0]


def overflowing_model() -> keras.Model:
    keras.utils.set_random_seed(2)
    dense = partial(keras.layers.Dense, activation="tanh", dtype="float64")
    inputs = keras.Input((4,), dtype="float64")
    x = OverflowingBehind(dtype="float64")([dense(8)(inputs), inputs])
    x = dense(8, name="second")(dense(8)(x))
    return keras.Model(inputs, dense(3, activation=None)(x))


def scaled_averaging_optimizer() -> Any:
    inner = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
    return hvdtrain.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=3)


def averages_of(optimizer: Any, model: Any) -> dict[str, np.ndarray]:
    """Return the averages of the weights by path."""
    from hvdtrain.state.structure import structure_of

    weights = structure_of(model).by_path(model.trainable_variables)
    return {path: np.array(average_of(innermost(optimizer), weight)) for path, weight in weights.items()}


@worlds("mpirun-2", extended=True)
@computing_in("float64")
def check_loss_scale_and_averages_are_those_of_one_process(world: World) -> None:
    """The first stage alone sees a gradient that overflows: both skip the step, halve the scale and keep averages."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((SAMPLES, 4))
    x[37, 0] = 1e3  # in the third batch of each epoch
    y = rng.integers(0, 3, SAMPLES)
    parts = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, SAMPLES, BATCH)] * EPOCHS
    plain, optimizer = overflowing_model(), scaled_averaging_optimizer()
    scaled = lambda gradients: [g * tf.cast(optimizer.dynamic_scale, g.dtype) for g in gradients]  # noqa: E731
    plain_training(plain, optimizer, per_sample, parts, scaled)
    assert int(optimizer.iterations) == len(parts) - EPOCHS, "nothing overflowed in one process"
    innermost(optimizer).finalize_variable_values(plain.trainable_variables)
    expected = plain.get_weights()
    folder = world.folder / "scaled_stages"

    def trainer_on(mesh: World, epochs: int, **options: Any) -> Any:
        trainer = hvdtrain.Trainer(
            overflowing_model,
            scaled_averaging_optimizer(),
            CROSS_ENTROPY,
            backend=mesh.backend,
            accumulate=2,
            **options,
        )
        trainer.fit((x, y), batch=BATCH, epochs=epochs, shuffle=False, verbose=False)
        return trainer

    def compare(trainer: Any) -> None:
        assert int(trainer.optimizer.iterations) == int(optimizer.iterations)
        assert float(trainer.optimizer.dynamic_scale) == float(optimizer.dynamic_scale)
        whole, mine = averages_of(optimizer, plain), averages_of(trainer.optimizer, trainer.model)
        error = relative_error(list(mine.values()), [whole[path] for path in mine])
        assert error <= TOLERANCE["float64"], f"averages: {error:.2e}"

    with on_mesh(world, "pp=2") as mesh:
        trainer = trainer_on(mesh, EPOCHS, pipeline_stages=("second",))
        error = error_of(mesh, trainer, expected, plain)
        assert error <= TOLERANCE["float64"], f"{error:.2e}"
        compare(trainer)
        trainer.save(folder)
    with on_mesh(world, "dp=-1") as mesh:
        other = trainer_on(mesh, 1)
        other.restore(folder)
        compare(other)
    world.gather(b"")
    if world.rank == 0:
        shutil.rmtree(folder)


@worlds("mpirun-2", extended=True)
@computing_in("float64")
def check_a_built_model_goes_on_in_another_trainer_and_is_used_by_nobody_else(world: World) -> None:
    """Its layers are trained on either rank, first in front of one cut, then in front of another."""
    x, _ = data()
    plain = model_of("float64", tied=True)
    for _ in range(2):
        expected = plain_training(plain, OPTIMIZERS["sgd"](), per_sample, batches())
    with on_mesh(world, "pp=2") as mesh:
        model = model_of("float64", tied=True)
        for stages in (("head",), ("dense1",)):
            trainer = trained(mesh, model, OPTIMIZERS["sgd"](), pipeline_stages=stages)
        error = error_of(mesh, trainer, expected, plain)
        assert error <= TOLERANCE["float64"], f"{error:.2e}"
        for use in (lambda: model(x), lambda: model.predict(x), model.get_weights, lambda: model.save("model.keras")):
            with pytest.raises(ConfigError, match="each rank trains the layers of its own"):
                use()


@worlds("mpirun-2", extended=True)
def check_stages_are_saved_and_restored_in_any_layout(world: World) -> None:
    folder = world.folder / "stages"
    x, y = data()
    with on_mesh(world, "pp=2") as mesh:
        trainer = trained(mesh, model_of("float64", tied=True), OPTIMIZERS["adam"](), epochs=1)
        trainer.save(folder)
        expected = trainer.evaluate((x, y), verbose=0, return_dict=True)["loss"]
    for axes, options in (("dp=-1", {}), ("pp=2", {"pipeline_stages": ("dense1",)})):
        with on_mesh(world, axes) as mesh:
            model = model_of("float64", tied=True)
            other = hvdtrain.Trainer(
                model, OPTIMIZERS["adam"](), CROSS_ENTROPY, ["accuracy"], backend=mesh.backend, accumulate=2, **options
            )
            other.fit((x, y), batch=BATCH, epochs=1, verbose=False)
            other.restore(folder)
            assert abs(other.evaluate((x, y), verbose=0, return_dict=True)["loss"] - expected) < 1e-12, axes
    world.gather(b"")
    if world.rank == 0:
        shutil.rmtree(folder)
