"""Models whose sequences are split along cp train as one process does, and so does all that is around them."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from as_keras import assert_trained_as_keras
from meshes import on_mesh
from world import World, computing_in, flat_bytes, moved, plain_training, refused, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.models import transformer as transformer
from hvdtrain.parallel.context.split import split_sequences

BATCH, EPOCHS, LENGTH, WORDS = 8, 4, 8, 32
SAMPLES = 36  # four full batches and one of 4 samples: 20 steps
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")  # whatever Keras' floatx is
FIT = {"batch": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": False, "log_every": 10}
layers = keras.layers


def gpt() -> keras.Model:
    return transformer.build((LENGTH,), WORDS, 1, depth=2, width=16, heads=4)


def masked() -> keras.Model:
    """Padding is masked in attention."""
    keras.utils.set_random_seed(11)
    make: dict[str, Any] = {"dtype": "float64"}
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 16, mask_zero=True, name="table", **make)(tokens)
    y = layers.MultiHeadAttention(4, 4, name="first", **make)(x, x, use_causal_mask=True)
    x = layers.Add(**make)([x, y])
    x = layers.LayerNormalization(**make)(x)
    x = layers.MultiHeadAttention(2, 4, dropout=1e-12, name="second", **make)(x, x)
    x = layers.Dense(16, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01), **make)(x)
    return keras.Model(tokens, layers.Dense(WORDS, name="logits", **make)(x))


def tokens(padded: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    found = rng.integers(1, WORDS, (SAMPLES, LENGTH)).astype("int32")
    if padded:  # the second half of some sequences is nothing else
        found[np.arange(LENGTH) >= rng.integers(2, LENGTH + 1, SAMPLES)[:, None]] = 0
    return found, np.roll(found, -1, 1)


def values(targets: Any, outputs: Any) -> tf.Tensor:
    return keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)


def batches_of(*arrays: np.ndarray) -> list[Any]:
    return [tuple(a[i : i + BATCH] for a in arrays) for i in range(0, SAMPLES, BATCH)] * EPOCHS


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.3, momentum=0.9, **options)


def trained(mesh: World, model: Any, data: tuple[Any, ...], loss: Any = LOSS, **options: Any) -> Any:
    trainer = hvdtrain.Trainer(model, sgd(), loss, backend=mesh.backend, **options)
    trainer.fit(data, **FIT)
    return trainer


def error_of(mesh: World, model: Any, start: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Return how far the weights of `model` are from those of one process; ranks must hold the same."""
    weights = [np.array(weight) for weight in model.get_weights()]
    assert moved(expected, start) >= 1e-2, "the weights hardly moved"
    assert mesh.same_everywhere(flat_bytes(weights)), "the ranks hold different models"
    return relative_error(weights, expected)


def copied(model: Any) -> list[np.ndarray]:
    return [np.array(weight) for weight in model.get_weights()]


def weighted_data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return *tokens(padded=True), np.random.default_rng(5).random((SAMPLES, LENGTH))


def masked_loss() -> Any:
    return type(LOSS)(from_logits=True, ignore_class=0)


def masked_training() -> tuple[keras.Model, list[np.ndarray]]:
    """Train `masked` in one process on `weighted_data`, and return its weights too."""
    x, y, weights = weighted_data()
    reference = masked()

    def weighted(targets: Any, outputs: Any) -> tf.Tensor:
        labels, scale, kept = tf.unstack(targets, axis=-1)
        mean = tf.reduce_sum(values(labels, outputs) * scale * kept) / tf.reduce_sum(kept)
        return mean + tf.add_n(reference.losses)

    packed = np.stack([y.astype("float64"), weights, (y != 0).astype("float64")], -1)
    return reference, plain_training(reference, sgd(), weighted, batches_of(x, packed))


@computing_in("float64")
def check_masks_weights_and_regularizers_in_float64(world: World) -> None:
    with on_mesh(world, "cp=2") as mesh:
        model = hvdtrain.parallelize(masked)
        trained(mesh, model, weighted_data(), masked_loss())
    error = error_of(world, model, copied(masked()), masked_training()[1])
    assert error <= 1e-9, f"{error:.2e}"


SHORT = 6


def translation() -> keras.Model:
    """An encoder and a decoder of other lengths, with padding in both, and a number of each sample."""
    source, target = keras.Input((LENGTH,), dtype="int32"), keras.Input((SHORT,), dtype="int32")
    x = layers.Embedding(WORDS, 16, mask_zero=True)(source)
    x = x + layers.MultiHeadAttention(2, 8)(x, x)
    y = layers.Embedding(WORDS, 16, mask_zero=True)(target)
    y = y + layers.MultiHeadAttention(2, 8)(y, y, use_causal_mask=True)
    y = y + layers.MultiHeadAttention(4, 4)(y, x)
    return keras.Model([source, target], layers.Dense(WORDS)(y))


@worlds("mpirun-2", extended=True)
def check_an_encoder_and_a_decoder_have_lengths_of_their_own(world: World) -> None:
    rng = np.random.default_rng(4)
    source, target = (rng.integers(1, WORDS, (SAMPLES, length)).astype("int32") for length in (LENGTH, SHORT))
    source[::2, 5:], target[::3, 3:] = 0, 0
    given = {"y": rng.integers(0, WORDS, (SAMPLES, SHORT)), "shuffle": False, "epochs": 2}
    with on_mesh(world, "cp=2") as mesh:
        built = iter([translation, lambda: hvdtrain.parallelize(translation)])

        def build() -> keras.Model:
            keras.utils.set_random_seed(3)
            return next(built)()

        assert_trained_as_keras(
            mesh,
            build,
            lambda: {"optimizer": sgd(), "loss": type(LOSS)(from_logits=True)},
            lambda: {"x": [source, target], "batch_size": BATCH, **given},
            evaluate=lambda: {"x": [source, target], "y": given["y"], "batch_size": BATCH},
            predict=lambda: {"x": [source, target], "batch_size": BATCH},
        )


class Deaf:
    """An exchange of which this rank's own part comes back in place of what `dropped` would have brought."""

    def __init__(self, exchange: Any, dropped: str) -> None:
        self._exchange, self._dropped = exchange, dropped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    def all_to_all(self, tensor: Any, *, name: str) -> Any:
        heard = self._exchange.all_to_all(tensor, name=name)
        return heard * 0 + tensor if self._dropped in name else heard


@worlds("mpirun-2", extended=True)
def check_a_collective_that_is_missing_is_noticed(world: World) -> None:
    x, y = tokens()
    with on_mesh(world, "cp=2") as mesh:
        reference = gpt()
        expected = plain_training(reference, sgd(), values, batches_of(x, y)[:2])
        for dropped in ("/query_key_value", "/output/back"):
            model = gpt()
            split_sequences(model, Deaf(mesh.backend.along("cp"), dropped), {})
            hvdtrain.Trainer(model, sgd(), LOSS, backend=mesh.backend).fit((x[:16], y[:16]), **FIT | {"epochs": 1})
            assert relative_error(copied(model), expected) > 1e-3, dropped


@worlds("mpirun-2", extended=True)
def check_what_is_around_split_sequences(world: World) -> None:
    """Microbatches, bounds, averages, divided slots, recomputation, evaluation, prediction and checkpoints."""
    x, y = tokens()
    options = {"clip_norm": 0.5, "accumulate": 2, "zero": 1, "recompute": True, "metrics": ["accuracy"]}
    average = {"use_ema": True, "ema_momentum": 0.9}
    folder = world.folder / "sequences"
    with on_mesh(world, "cp=2") as mesh:
        model = hvdtrain.parallelize(gpt)
        trainer = hvdtrain.Trainer(model, sgd(**average), LOSS, backend=mesh.backend, **options)
        trainer.fit((x, y), validation_data=(x, y), **FIT)
        weights, scores, outputs = copied(model), trainer.evaluate((x, y), return_dict=True), trainer.predict(x)
        assert np.abs(model(x[:3]).numpy() - gpt_of(weights)(x[:3]).numpy()).max() <= 1e-5, "a call of the model"
        trainer.save(folder)
    reference, optimizer = gpt(), sgd(**average)
    clip = lambda gradients: tf.clip_by_global_norm(gradients, 0.5)[0]  # noqa: E731
    plain_training(reference, optimizer, values, batches_of(x, y), clip)
    optimizer.finalize_variable_values(reference.trainable_variables)
    error = relative_error(weights, reference.get_weights())
    assert error <= 1e-6, f"{error:.2e}"
    whole = reference(x).numpy()
    assert outputs.shape == whole.shape
    assert np.abs(outputs - whole).max() <= 1e-5 * np.abs(whole).max(), "predict"
    assert abs(scores["loss"] - float(tf.reduce_mean(values(y, whole)))) <= 1e-5
    assert abs(scores["accuracy"] - np.mean(whole.argmax(-1) == y)) <= 1e-6
    with on_mesh(world, "dp=-1") as plain:
        again = hvdtrain.Trainer(gpt(), sgd(**average), LOSS, backend=plain.backend, clip_norm=0.5)
        again.restore(folder)
        assert np.abs(again.predict(x) - outputs).max() <= 1e-5, "restored without cp"


def gpt_of(weights: list[np.ndarray]) -> Any:
    model = gpt()
    model.set_weights(weights)
    return model


@worlds("mpirun-2", extended=True)
def check_what_does_not_fit_is_refused(world: World) -> None:
    x, y = tokens()
    with on_mesh(world, "cp=2") as mesh:
        plain = hvdtrain.Trainer(gpt(), sgd(), LOSS, backend=mesh.backend)
        with refused("nothing of the model"):
            plain.fit((x, y), **FIT)
        model = hvdtrain.parallelize(gpt)
        for options, words in [
            ({"jit": True}, "jit does not go with parallel='cp=2'"),
            ({"local_steps": 2}, "local_steps=2 does not go with parallel='cp=2'"),
        ]:
            with refused(words):
                hvdtrain.Trainer(model, sgd(), LOSS, **options)
        trainer = hvdtrain.Trainer(model, sgd(), LOSS, backend=mesh.backend)
        other = x if mesh.session.world.rank else x[::-1]
        with refused("rank 1"):
            trainer.fit((other, y), **FIT)


@worlds("gloo-4", extended=True)
def check_axes_and_samples_that_do_not_go_together_are_refused(world: World) -> None:
    x, y = tokens()
    with on_mesh(world, "cp=2,dp=2") as mesh:
        trainer = hvdtrain.Trainer(hvdtrain.parallelize(gpt), sgd(), LOSS, backend=mesh.backend)
        with refused('shard="rank" gives each rank samples of its own'):
            trainer.fit((x, y), shard="rank", **FIT)
        with refused('shard="rank" gives each rank samples'):
            trainer.predict(x[mesh.rank :], shard="rank")
