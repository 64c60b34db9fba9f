"""Keras callbacks see figures over all ranks and act alike on each of them."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from as_keras import assert_trained_as_keras
from checks.keras_models import CROSSENTROPY, LABELS, X, sequential, sgd
from world import World, flat_bytes, refused
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import ConfigError


def fit(world: World, callbacks: list[Any], epochs: int = 3, optimizer: Any = None, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    trainer = hvdtrain.Trainer(sequential(), optimizer or sgd(), CROSSENTROPY, ["accuracy"], backend=world.backend)
    result = trainer.fit(
        (X, LABELS), batch=16, epochs=epochs, validation_data=(X, LABELS), verbose=False, callbacks=callbacks, **options
    )
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
    return trainer, result


def check_early_stopping_stops_all_at_one_step(world: World) -> None:
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=10.0, restore_best_weights=True)
    _, result = fit(world, [stop], epochs=9)
    assert result.steps == 10, result.steps  # two epochs of five steps
    assert world.same_everywhere(str(result.steps).encode())


@worlds("mpirun-2", extended=True)
def check_one_rank_may_stop_all(world: World) -> None:
    """A callback of a user's own, which decides by something that only one rank knows."""

    class Impatient(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if world.rank == world.size - 1 and batch == 1:
                self.model.stop_training = True

    _, result = fit(world, [Impatient()], log_every=3)
    assert world.same_everywhere(str(result.steps).encode())
    assert result.steps == 2, result.steps  # before the next logged step


@worlds("mpirun-2", extended=True)
def check_rates_and_history(world: World) -> None:
    reduce = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=0, min_delta=10.0, factor=0.5)
    seen: list[dict[str, float]] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    trainer, result = fit(world, [reduce, note])
    # The first epoch sets the mark, each of the two others halves the rate.
    np.testing.assert_allclose(float(trainer.optimizer.learning_rate), 0.0625 / 4, rtol=1e-6)
    assert world.same_everywhere(repr(seen).encode()), "the ranks saw different figures"
    assert set(seen[0]) >= {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert result.history["val_loss"] == [record.loss for record in result.evaluations]


def check_epoch_figures_are_of_all_samples(world: World) -> None:
    """With a rate of zero nothing moves: the epoch's accuracy and loss are those of the data."""
    _, result = fit(world, [keras.callbacks.Callback()], epochs=1, optimizer=keras.optimizers.SGD(0.0))
    np.testing.assert_allclose(result.history["accuracy"], result.history["val_accuracy"], rtol=1e-6)
    np.testing.assert_allclose(result.history["loss"], result.history["val_loss"], rtol=1e-6)


def check_writers_write_once(world: World) -> None:
    folder = world.folder / f"callbacks-{world.controller}-{world.size}"
    folder.mkdir(exist_ok=True)
    callbacks = [
        keras.callbacks.CSVLogger(str(folder / f"log-{world.rank}.csv")),
        keras.callbacks.ModelCheckpoint(
            str(folder / f"best-{world.rank}.keras"), monitor="val_loss", save_best_only=True
        ),
        keras.callbacks.TensorBoard(str(folder / f"board-{world.rank}")),
    ]
    fit(world, callbacks)
    world.gather(b"written")
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["best-0.keras", "board-0", "log-0.csv"], files
    lines = (folder / "log-0.csv").read_text().splitlines()
    assert len(lines) == 4, lines
    assert lines[0].startswith("epoch,accuracy,"), lines
    keras.models.load_model(folder / "best-0.keras", compile=False)


@worlds("mpirun-2", extended=True)
def check_batches_show_figures_of_all_samples_so_far(world: World) -> None:
    """With a rate of zero: those that one process finds in the same samples. The callback is on the last rank only."""
    seen: dict[str, list[dict[str, float]]] = {"train": [], "test": []}
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen["train"].append(dict(logs)))
    note.on_test_batch_end = lambda batch, logs=None: seen["test"].append(dict(logs))
    callbacks = [note] if world.rank == world.size - 1 else []
    trainer, result = fit(
        world, callbacks, epochs=1, optimizer=keras.optimizers.SGD(0.0), shuffle=False, validation_batch=32
    )
    assert set(result.history) >= {"loss", "val_accuracy"}
    if not callbacks:
        return
    logits = np.asarray(trainer.model(X))
    right = logits.argmax(1) == LABELS
    for kind, batch in (("train", 16), ("test", 32)):
        ends = [min(end, len(X)) for end in range(batch, len(X) + batch, batch)]
        expected = [(float(CROSSENTROPY(LABELS[:end], logits[:end])), right[:end].mean()) for end in ends]
        found = [(logs["loss"], logs["accuracy"]) for logs in seen[kind]]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@worlds("mpirun-2", extended=True)
def check_rates_that_differ_are_refused(world: World) -> None:
    if world.size > 1:
        rogue = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: setattr(rogue.model.optimizer, "learning_rate", 0.1 * (world.rank + 1))
        )
        with refused("A callback set the learning rate 0.2 on rank 1 and 0.1 on rank 0", ConfigError):
            fit(world, [rogue])


class Centered(keras.layers.Layer):
    """Subtracts in inference a moving average of its inputs, which training does not use."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(x, 0))
            return x
        return x - self.mean


class NamedStep(keras.Model):
    """A step of its own, which returns numbers of a batch by the names of the model's metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential([keras.Input((6,)), Centered(), keras.layers.Dense(1)])

    def call(self, x: Any, training: bool = False) -> Any:
        return self.net(x, training=training)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(*((loss,) if metric.name == "loss" else (y, outputs)))
        return {"loss": loss, "mae": tf.reduce_mean(tf.abs(y - outputs))}


class Inquisitive(keras.callbacks.Callback):
    """Evaluates, predicts, reads metrics and averages weights wherever a callback can."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.x, self.y = x, y

    def on_train_begin(self, logs: Any = None) -> None:
        self.average = self.model.get_weights()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen: list[Any] = [self.model.evaluate(self.x[:10], self.y[:10], verbose=0)[0]]

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(self.model.predict(self.x[:2], verbose=0).sum())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += [logs["loss"], *self.model.get_metrics_result().values()]
        self.average = [0.9 * a + 0.1 * b for a, b in zip(self.average, self.model.get_weights(), strict=True)]
        if batch == 1:
            self.model.reset_metrics()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen += self.model.get_metrics_result().values()
        logs["second"] = self.model.evaluate(-self.x[:10], self.y[:10], verbose=0)[0]
        logs["seen"] = np.array(self.seen, "float64")

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.average)


@worlds("mpirun-2")
@worlds("gloo-4", extended=True)
def check_callbacks_use_the_model_and_its_metrics_as_in_keras(world: World) -> None:
    """What they find within an epoch is over all ranks, and what they leave in the metrics ends with the epoch."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 6)) + np.linspace(-1, 2, 64)[:, None]
    y = 2 * x[:, :1] - x[:, 1:2]

    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = NamedStep()
        model(x[:2])
        return model

    def compiled() -> dict[str, Any]:
        return {"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", "metrics": ["mae"]}

    def fit() -> dict[str, Any]:
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
        # At the end of the second epoch callbacks find the metrics of the validation, as in Keras.
        validation = {"validation_data": (x[:20], y[:20]), "validation_freq": 2}
        return {"x": batches, "epochs": 2, "callbacks": [Inquisitive(x, y)], **validation}

    assert_trained_as_keras(world, build, compiled, fit)
