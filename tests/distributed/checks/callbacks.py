"""Keras callbacks see figures over all ranks and act alike on each of them."""

from typing import Any

import keras
import numpy as np
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
    assert result.steps == 3, result.steps  # at the next logged step


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
