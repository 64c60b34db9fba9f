"""What ranks along tp compute each by itself: rounded in different ways, it must not let their weights drift apart."""

from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from meshes import on_mesh
from world import World
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import DesyncError
from hvdtrain.parallel.tensor.parallelize import Parallelization
from hvdtrain.training.update_rules.zero import shards

BATCH, LENGTH, WIDTH, WORDS, CLASSES = 8, 4, 8, 12, 3
SAMPLES = 32
RULES = {"up/kernel": (None, "tp"), "down/kernel": ("tp", None), "classes/kernel": (None, "tp")}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
FIT = {"batch": BATCH, "shuffle": False, "verbose": False}


class OwnWay(keras.layers.Layer):
    """Passes activations on, and their gradient with an error, in every element another."""

    rounding = 0.0
    """Error that is each rank's own: neither an argument nor a variable, which all ranks have from rank 0."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.error = tf.Variable(0.0, trainable=False)

    def call(self, inputs: Any) -> Any:
        error = tf.cast(self.error + self.rounding, inputs.dtype)

        @tf.custom_gradient
        def passed(x: tf.Tensor) -> Any:
            def backward(gradient: tf.Tensor) -> tf.Tensor:
                wave = tf.reshape(tf.cos(tf.range(tf.size(x), dtype=x.dtype)), tf.shape(x))
                return gradient * (1 + error * wave)

            return tf.identity(x), backward

        return passed(inputs)


def built(rounding: float = 0.0) -> keras.Model:
    """A block between an embedding, whose gradient is sparse, and logits; nothing of its norm and biases is cut."""
    keras.utils.set_random_seed(5)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH, name="tokens")(tokens)
    y = keras.layers.Dense(2 * WIDTH, activation="relu", name="up")(x)
    x = keras.layers.LayerNormalization(name="norm")(x + keras.layers.Dense(WIDTH, name="down")(y))
    own_way = OwnWay(name="own_way")
    own_way.rounding = rounding
    x = own_way(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, keras.layers.Dense(CLASSES, name="classes")(x))


def split(mesh: World, rounding: float = 0.0) -> keras.Model:
    return Parallelization(mesh.backend.along("tp"), RULES, mesh.backend)(lambda: built(rounding), None)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(6)
    return rng.integers(0, WORDS, (SAMPLES, LENGTH)).astype("int32"), rng.integers(0, CLASSES, SAMPLES)


def axes_of(world: World) -> str:
    return "tp=2" if world.size == 2 else "dp=2,tp=2"


@worlds("mpirun-2", "gloo-4", extended=True)
def check_rounding_does_not_let_ranks_drift_apart(world: World) -> None:
    """In the last bits of each rank's gradients: the check between steps, which compares bits, finds nothing."""
    variants: tuple[dict[str, Any], ...] = (
        {"clip_norm": 0.5},
        {"accumulate": 2, "sparse_gradients": "gather"},
        *({"zero": stage, "clip_norm": 0.5} for stage in ((1, 3) if world.size == 4 else ())),
    )
    with on_mesh(world, axes_of(world)) as mesh, mock.patch.object(shards, "SMALL_BYTES", 0):
        error = 2.0**-22 * mesh.session.world.rank
        for options in variants:
            model = split(mesh, error)
            trainer = hvdtrain.Trainer(model, "adam", LOSS, backend=mesh.backend, desync_every=1, **options)
            trainer.fit(*data(), epochs=2, **FIT)
            trainer.rule.consolidate()
            along_tp = mesh.backend.gather_bytes(model.get_layer("norm").gamma.numpy().tobytes(), timeout=60)
            assert len(set(along_tp)) == 1, options


class Figures(keras.callbacks.Callback):
    """Keeps what it is given at the ends of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(repr(logs))


@worlds("mpirun-2", "gloo-4", extended=True)
def check_callbacks_are_given_the_same_figures(world: World) -> None:
    """By which they decide: a metric that is rounded in its own way on each rank, and one with several values."""
    with on_mesh(world, axes_of(world)) as mesh:

        def rounded(targets: Any, outputs: Any) -> tf.Tensor:
            return 1 / 3 + 2.0**-22 * mesh.session.world.rank + 0 * outputs[:, 0]

        metrics = [keras.metrics.MeanMetricWrapper(rounded, "rounded"), keras.metrics.F1Score(name="f1")]
        model = split(mesh)
        trainer = hvdtrain.Trainer(
            model, "sgd", keras.losses.CategoricalCrossentropy(from_logits=True), metrics, backend=mesh.backend
        )
        x, y = data()
        figures = Figures()
        one_hot = np.eye(CLASSES, dtype="float32")[y]
        trainer.fit(x, one_hot, epochs=2, callbacks=[figures], validation_data=(x, one_hot), **FIT)
        assert "val_rounded" in figures.seen[0], figures.seen[0]
        assert "array" in figures.seen[0], figures.seen[0]
        assert world.same_everywhere("".join(figures.seen).encode()), figures.seen


@worlds("mpirun-2")
@worlds("gloo-4", extended=True)
def check_other_gradients_than_by_rounding_are_named(world: World) -> None:
    """As of ranks that draw other masks: their mean would hide it. From the second call of fit on, which compiles no
    step anew."""
    with on_mesh(world, axes_of(world)) as mesh:
        for zero in (0, 1) if world.size == 4 else (0,):
            model = split(mesh)
            trainer = hvdtrain.Trainer(model, "adam", LOSS, backend=mesh.backend, zero=zero)
            trainer.fit(*data(), epochs=1, **FIT)
            error, own = model.get_layer("own_way").error, 0.1 * mesh.session.world.rank
            # Once the training is under way: what layers hold is rank 0's at its start.
            differ = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_, e=error, own=own: e.assign(own))
            try:
                trainer.fit(*data(), epochs=1, callbacks=[differ], **FIT)
            except DesyncError as error:
                message = str(error)
            else:
                raise AssertionError("nobody noticed")
            assert world.same_everywhere(message.encode()), message
            assert message.startswith("After step 5 ranks that hold slices of the same layers (tp in"), message
            assert "% of the norm of all of them, of layers/1/embeddings" in message, message
