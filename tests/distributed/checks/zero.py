"""ZeRO stages 2 and 3, sharded gradients and parameters, against one process."""

from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from builders import (
    BATCH,
    CROSS_ENTROPY,
    EPOCHS,
    OPTIMIZERS,
    TOLERANCE,
    assert_moved,
    batches_of,
    per_sample,
    trained_alone,
    wide_data,
    wide_model,
)
from checks.update_rules import CLIP_NORM, assert_equal, averaged_alone, decaying_and_averaging, trained
from world import World, computing_in, exact_arrays, flat_bytes, grappler, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.training.update_rules.zero import gathered
from hvdtrain.training.update_rules.zero.shards import SMALL_BYTES

WORDS, DIM, SAMPLES = 211, 48, 65  # one sample is left for the last batch: the other ranks have none


class TiedModel(keras.Model):
    """Attention between an embedding and a head that is its transpose."""

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype=dtype)
        self.table = keras.layers.Embedding(WORDS, DIM, dtype=dtype)
        self.attention = keras.layers.MultiHeadAttention(4, DIM, dtype=dtype)
        self.norm = keras.layers.LayerNormalization(dtype=dtype)
        self.inner = keras.layers.Dense(5 * DIM, "relu", kernel_regularizer=keras.regularizers.L2(1e-3), dtype=dtype)
        self.outer = keras.layers.Dense(DIM, dtype=dtype)

    def call(self, inputs: Any) -> Any:
        x = self.table(inputs)
        x = self.norm(x + self.attention(x, x))
        x = keras.ops.mean(x + self.outer(self.inner(x)), axis=1)
        return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))


def tied_model(dtype: str, seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = TiedModel(dtype)
    model(tied_data()[0][:2])
    sharded = [v for v in model.trainable_variables if v.value.dtype.size * int(np.prod(v.shape)) > SMALL_BYTES]
    assert len(sharded) == 7, [v.path for v in sharded]
    return model


def tied_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.integers(0, WORDS, (SAMPLES, 6)), rng.integers(0, WORDS, SAMPLES)


def tied_alone() -> list[np.ndarray]:
    """Train in one process, with the regularization that a step adds once for the whole batch."""
    model = tied_model("float64", 0)

    def losses(y: Any, outputs: Any) -> Any:
        return per_sample(y, outputs) + tf.add_n(model.losses)

    start = model.get_weights()
    weights = plain_training(model, keras.optimizers.Adam(0.01), losses, batches_of(*tied_data()))
    assert_moved(weights, start)
    return weights


@worlds("mpirun-2")
@worlds("gloo-4", extended=True)
@grappler()
@exact_arrays()
def check_stages_2_and_3_train_like_one_process(world: World) -> None:
    for kind, optimizer, dtype in (("wide", "sgd", "float32"), ("table", "adam", "float64")):
        expected = world.reference(trained_alone, kind, optimizer, dtype)
        for stage in (2, 3):
            trainer = trained(world, kind, OPTIMIZERS[optimizer](), dtype, zero=stage)
            assert_equal(trainer, expected, dtype, f"{kind} stage {stage}")


@worlds("mpirun-2", extended=True)
@computing_in("float64")
def check_shared_weights_and_attention_train_like_one_process(world: World) -> None:
    """Microbatches in a loop, a rank without samples, weights that are used twice, and a regularizer."""
    expected = world.reference(tied_alone)
    for options in ({"zero": 3, "accumulate": 2}, {"zero": 3, "zero_prefetch": 1}):
        model = tied_model("float64", world.rank)
        trainer = hvdtrain.Trainer(model, keras.optimizers.Adam(0.01), CROSS_ENTROPY, backend=world.backend, **options)
        trainer.fit(tied_data(), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False)
        assert world.same_everywhere(flat_bytes(model.get_weights()))
        error = relative_error(model.get_weights(), expected)
        assert error <= TOLERANCE["float64"], f"{options}: {error:.2e}"


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_stages_with_everything_else(world: World) -> None:
    """Bounds on the global norm, decay, averages, microbatches, evaluation and predictions: as in one process."""
    x, y = wide_data("float64")
    expected, outputs, mean = world.reference(averaged_alone)
    for stage in (2, 3):
        options = {"zero": stage, "clip_norm": CLIP_NORM, "accumulate": 2}
        trainer = trained(world, "wide", decaying_and_averaging(), "float64", **options)
        assert_equal(trainer, expected, "float64", f"stage {stage}: clipped, decayed, accumulated")
        figures = trainer.evaluate((x, y), batch=16, return_dict=True)
        assert abs(figures["loss"] - mean) <= 1e-6 * mean, (figures["loss"], mean)
        np.testing.assert_allclose(trainer.predict(x, batch=16), outputs, rtol=0, atol=1e-8)


class Looking(keras.callbacks.Callback):
    """Sets weights in the middle of an epoch, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(np.abs(self.model.get_weights()[0]).sum()))
        if batch == 1:
            self.model.set_weights([weight * 0.5 for weight in self.model.get_weights()])


@worlds("mpirun-2", extended=True)
def check_callbacks_see_and_set_whole_weights(world: World) -> None:
    results = []
    for stage in (0, 3):
        looking = Looking()
        best = keras.callbacks.EarlyStopping(monitor="val_loss", patience=9, restore_best_weights=True)
        trainer = hvdtrain.Trainer(
            wide_model("float64", 0), keras.optimizers.SGD(0.1), CROSS_ENTROPY, backend=world.backend, zero=stage
        )
        data = wide_data("float64")
        trainer.fit(
            data, batch=BATCH, epochs=2, shuffle=False, verbose=False, validation_data=data, callbacks=[looking, best]
        )
        results.append((trainer.model.get_weights(), looking.seen))
    assert relative_error(results[1][0], results[0][0]) <= 1e-9
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-9)


@worlds("mpirun-2", extended=True)
def check_a_frozen_model_is_evaluated_and_not_trained(world: World) -> None:
    """As an encoder is, before it goes into another model."""
    data = wide_data("float64")
    for stage in (1, 3):
        trainer = hvdtrain.Trainer(
            wide_model("float64", 0), keras.optimizers.SGD(0.1), CROSS_ENTROPY, backend=world.backend, zero=stage
        )
        trainer.fit(data, batch=BATCH, epochs=1, verbose=False)
        before = trainer.evaluate(data, batch=BATCH, return_dict=True)["loss"]
        trainer.model.trainable = False
        assert trainer.evaluate(data, batch=BATCH, return_dict=True)["loss"] == before
        try:
            trainer.fit(data, batch=BATCH, epochs=1, verbose=False)
        except ConfigError as error:
            assert "Layers were frozen or unfrozen" in str(error)
        else:
            raise AssertionError("it was trained")


@worlds("mpirun-2", extended=True)
def check_a_checkpoint_goes_on_in_any_stage(world: World) -> None:
    """Saved by `fit` at one stage and restored at another: equal bits, and a training that goes on the same."""
    data, fit = wide_data("float64"), {"batch": BATCH, "shuffle": False, "verbose": False}

    def trainer_of(seed: int, stage: int) -> Any:
        optimizer = keras.optimizers.Adam(0.01)
        return hvdtrain.Trainer(
            wide_model("float64", seed), optimizer, CROSS_ENTROPY, backend=world.backend, zero=stage
        )

    whole = trainer_of(0, 0)
    whole.fit(data, epochs=4, **fit)
    for before, after in ((3, 0), (2, 3)):
        first = trainer_of(world.rank, before)
        folder = world.folder / f"stage-{before}-{after}"
        first.fit(data, epochs=2, checkpoint=folder, **fit)
        second = trainer_of(7 + world.rank, after)
        second.restore(folder)
        second.evaluate(data)  # loads it
        assert flat_bytes(second.model.get_weights()) == flat_bytes(first.model.get_weights()), (before, after)
        second.fit(data, epochs=2, **fit)
        assert_equal(second, whole.model.get_weights(), "float64", f"from stage {before} to {after}")


@worlds("mpirun-2", extended=True)
def check_each_rank_saves_its_slices_of_the_parameters(world: World) -> None:
    trainer = hvdtrain.Trainer(
        wide_model("float32", world.rank), keras.optimizers.SGD(0.1), CROSS_ENTROPY, backend=world.backend, zero=3
    )
    trainer.fit(wide_data("float32"), batch=BATCH, epochs=1, verbose=False, checkpoint=world.folder / "parameters")
    trainer.rule.prepare_to_save()
    slices = [t for path, t in trainer.state.named_tensors().items() if path.startswith("model/") and not t.replicated]
    assert len(slices) == 2
    kernels = [layer.kernel._value.numpy() for layer in trainer.model.layers[:2]]
    assert all(kernel.size == 0 for kernel in kernels), "the whole parameters are still in memory"
    files = sorted(path.name for path in (world.folder / "parameters").glob("step-*/*") if path.name != "index.json")
    assert len(files) >= world.size, files


@worlds("mpirun-2", extended=True)
def check_a_bad_gradient_is_named_with_its_rank(world: World) -> None:
    """One sample's gradient is NaN, with a finite loss: the error names the step and the rank that had the sample."""

    def loss(targets: Any, outputs: Any) -> Any:
        nothing = outputs[:, 0] - outputs[:, 0]
        return per_sample(targets, outputs) + tf.where(targets == 2, tf.sqrt(nothing), nothing)

    for stage, microbatches in ((2, 1), (3, 2)):
        x, y = wide_data("float32")
        y = np.minimum(y, 1)
        y[2 * BATCH - 1] = 2  # the last sample of the second batch, which the last rank takes
        said: list[str] = []
        trainer = hvdtrain.Trainer(
            wide_model("float32", 0),
            "sgd",
            loss,
            backend=world.backend,
            zero=stage,
            spike_threshold=1e6,
            accumulate=microbatches,
        )
        try:
            trainer.fit((x, y), batch=BATCH, epochs=1, shuffle=False, verbose=False)
        except ValueError as error:
            said.append(str(error))
        assert said, f"stage {stage}: an infinite gradient went unnoticed"
        assert f"of rank {world.size - 1}" in said[0], said[0]
        assert "gradient of" in said[0], said[0]
        assert "step 2" in said[0].lower(), said[0]


@worlds("mpirun-2", extended=True)
def check_the_comparison_notices_a_gradient_that_is_not_exchanged(world: World) -> None:
    expected = world.reference(trained_alone, "wide", "sgd", "float32")
    exchanged = gathered.scattered

    def own(gradient: Any, shard: Any, name: str) -> Any:
        first = shard.exchange.index == 0
        return world.size * exchanged(tf.where(first, gradient, tf.zeros_like(gradient)), shard, name)

    gathered.scattered = own
    try:
        trainer = trained(world, "wide", keras.optimizers.SGD(0.1, momentum=0.9), "float32", zero=3)
    finally:
        gathered.scattered = exchanged
    assert relative_error(trainer.model.get_weights(), expected) > 1e-4


class OwnGradient(keras.layers.Layer):
    """Multiplies by a kernel in a function that returns the kernel's gradient itself."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient
        def product(x: Any) -> Any:
            def gradient(upstream: Any, variables: Any = None) -> Any:
                return upstream @ tf.transpose(self.kernel.value), [tf.transpose(x) @ upstream for _ in variables]

            return x @ self.kernel.value, gradient

        return product(inputs)


@worlds("mpirun-2", extended=True)
def check_what_stage_3_cannot_gather_is_refused(world: World) -> None:
    inner = keras.layers.Dense(131)
    spectral = keras.Sequential([keras.Input((131,)), keras.layers.SpectralNormalization(inner), keras.layers.Dense(3)])

    def wide_with(read: Any) -> keras.Model:
        layers = wide_model("float32", 0).layers
        return keras.Sequential([keras.Input((131,)), *layers, keras.layers.Lambda(lambda x: read(layers[0], x))])

    direct = wide_with(lambda layer, x: x + 0.0 * tf.reduce_sum(layer.kernel._value))
    copied = wide_with(lambda layer, x: tf.vectorized_map(lambda row: row + 0.0 * keras.ops.sum(layer.kernel), x))
    own = keras.Sequential([keras.Input((131,)), OwnGradient(), keras.layers.Dense(3)])
    for model, words in (
        (spectral, "an assignment to "),
        (direct, "layers/0/kernel, whose memory is read directly"),
        (copied, "layers/0/kernel, read within tf.vectorized_map"),
        (own, "for layers/0/kernel, as from a tf.custom_gradient function"),
    ):
        trainer = hvdtrain.Trainer(model, "sgd", CROSS_ENTROPY, backend=world.backend, zero=3)
        try:
            trainer.fit(wide_data("float32"), batch=BATCH, verbose=False)
        except ConfigError as error:
            assert words in str(error), error
            assert "Use zero=2" in str(error), error
        else:
            raise AssertionError(f"{words}: trained")


def memory_of(variable: Any) -> int:
    """Return the bytes that a variable takes."""
    held = tf.raw_ops.ReadVariableOp(resource=variable._value.handle, dtype=variable._value.dtype)
    return held.numpy().nbytes


@worlds("mpirun-2", "gloo-4", extended=True)
@grappler()
@exact_arrays()
def check_a_model_that_a_function_builds_is_slices_from_the_start(world: World) -> None:
    """Never whole: as it is built, trained, evaluated between epochs, saved, and restored from a file of any stage."""
    data, expected = wide_data("float64"), world.reference(trained_alone, "wide", "adam", "float64")
    folder = world.folder / "from_the_start"
    fit = {"validation_data": data, "validation_batch": BATCH, "batch": BATCH, "shuffle": False, "verbose": False}

    def trainer_of(model: Any, stage: int) -> Any:
        return hvdtrain.Trainer(model, keras.optimizers.Adam(0.01), CROSS_ENTROPY, backend=world.backend, zero=stage)

    def in_slices(trainer: Any) -> bool:
        return sum(memory_of(layer.kernel) for layer in trainer.model.layers[:2]) == 0

    whole = trainer_of(wide_model("float64", 0), 0)
    figures = whole.fit(data, epochs=EPOCHS, **fit)
    begun = trainer_of(lambda: wide_model("float64", world.rank), 3)  # where ranks draw others, those of rank 0 count
    assert in_slices(begun)
    for look in (begun.model, begun.model.predict):  # Keras' predict reads the weights in a compiled function
        try:
            look(data[0][:BATCH])
        except ConfigError as error:
            assert "trainer.consolidate()" in str(error), error
        else:
            raise AssertionError(f"{look} took empty weights")
    begun.consolidate()
    for layer, first in zip(begun.model.layers[:2], wide_model("float64", 0).layers, strict=False):
        np.testing.assert_array_equal(layer.kernel, first.kernel)
    trainer = trainer_of(lambda: wide_model("float64", world.rank), 3)
    kind, evaluated = type(begun.rule), []
    consolidate = kind.consolidate

    def noted(rule: Any) -> None:
        evaluated.append(in_slices(trainer))
        consolidate(rule)

    with mock.patch.object(kind, "consolidate", noted):
        sharded = trainer.fit(data, epochs=EPOCHS, checkpoint=folder, **fit)
    assert evaluated == [True], "whole before the end of fit"
    assert_equal(trainer, expected, "float64", "built by a function")
    for one, other in zip(sharded.evaluations, figures.evaluations, strict=True):
        assert abs(one.loss - other.loss) <= 1e-9 * other.loss, (one, other)
    restored = trainer_of(lambda: wide_model("float64", 7 + world.rank), 3)
    restored.restore(folder)
    assert in_slices(restored), "whole as it is restored"
    restored.consolidate()
    assert flat_bytes(restored.model.get_weights()) == flat_bytes(trainer.model.get_weights())
