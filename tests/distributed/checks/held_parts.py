"""What ranks that hold parts of one model must have in common: noticed where it differs, and decided together."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from checks.hybrids import FIT, LOSS, data, split
from meshes import on_mesh
from world import World, computing_in, refused
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import ConfigError, DesyncError
from hvdtrain.optim.precision import precision

ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Drift(keras.callbacks.Callback):
    """Changes the last bit of one weight on one rank."""

    def __init__(self, path: str, here: bool) -> None:
        super().__init__()
        self.path, self.here = path, here

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.here and batch == 1:
            variable = next(v for v in self.model.variables if v.path.endswith(self.path))
            value = variable.numpy()
            value.flat[-1] = np.nextafter(value.flat[-1], np.inf)
            variable.assign(value)


@worlds("mpirun-2", "gloo-4", extended=True)
@computing_in("float64")
def check_a_part_that_drifts_is_named(world: World) -> None:
    """Slices are compared among those that hold the same ones, and what is whole among all."""
    cases = {2: [("tp=2", "norm/gamma", 0), ("tp=2", "up/kernel", None)], 4: [("dp=2,ep=2", "experts/kernel_in", 1)]}
    for axes, path, usual in cases[world.size]:
        with on_mesh(world, axes) as mesh:
            drifts = Drift(path, mesh.session.world.rank == world.session.world.size - 1)
            trainer = hvdtrain.Trainer(split(mesh), "sgd", LOSS, backend=mesh.backend, desync_every=1)
            said = ""
            try:
                trainer.fit(data(), epochs=1, callbacks=[drifts], **FIT)
            except DesyncError as error:
                said = str(error)
            last = world.session.world.size - 1
            expected = f"on rank {last} other values than on rank {usual} of model/"
            assert (expected in said) == (usual is not None), f"{axes} {path}: {said}"
            assert path.rpartition("/")[2] in said or usual is None, said


TABLE_ROWS = np.arange(24, dtype="int32").reshape(8, 3)


def classifier(mode: str = "row") -> keras.Model:
    """Of three numbers, by a table that is divided along ep."""
    given = keras.Input((3,), dtype="int32")
    x = keras.layers.Flatten()(hvdtrain.ShardedEmbedding(24, 4, mode)(given))
    return keras.Model(given, keras.layers.Dense(2, name="dense")(x))


def labels() -> np.ndarray:
    return TABLE_ROWS[:, 0] % 2


@worlds("mpirun-2", "gloo-4", extended=True)
def check_what_would_copy_slices_is_refused_before_the_first_step(world: World) -> None:
    callbacks = keras.callbacks
    with on_mesh(world, "ep=2") as mesh:
        trainer = hvdtrain.Trainer(classifier(), "sgd", ENTROPY, backend=mesh.backend)
        best = callbacks.EarlyStopping("loss", restore_best_weights=True)
        for callback, options, words in (
            (callbacks.ModelCheckpoint(str(world.folder / "m.keras")), {}, "ModelCheckpoint would write the slices"),
            (best, {"checkpoint": str(world.folder / "saves")}, "EarlyStopping(restore_best_weights=True) keeps"),
        ):
            more = {"callbacks": [callback], **options}
            with refused(words, ConfigError):
                trainer.fit(TABLE_ROWS, labels(), batch=4, epochs=2, verbose=False, **more)
            assert trainer.state.scalars.step == 0
        trainer.fit(TABLE_ROWS, labels(), batch=4, epochs=2, verbose=False, callbacks=[best])


@worlds("mpirun-2", "gloo-4", extended=True)
def check_optimizers_of_whole_weights_are_refused_once_a_model_is_built(world: World) -> None:
    """By its first batch, after the trainer was made."""
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    with on_mesh(world, "ep=2") as mesh:
        for optimizer in (keras.optimizers.Adam(clipnorm=0.1), keras.optimizers.Lamb()):
            model = keras.Sequential([hvdtrain.MixtureOfExperts(2, 4), keras.layers.Dense(1)])
            trainer = hvdtrain.Trainer(model, optimizer, "mse", backend=mesh.backend)
            with refused("which is split among ranks, does not go with", ConfigError):
                trainer.fit(x, y, batch=4, verbose=False)


@worlds("mpirun-2", "gloo-4", extended=True)
def check_an_overflow_in_a_table_is_skipped_by_ranks_without_it(world: World) -> None:
    """All others hold slices of it without rows, whose gradients are empty."""
    with on_mesh(world, "ep=2") as mesh:
        with precision("mixed_float16"):
            model = classifier("table")
        dense = model.get_layer("dense").kernel
        # The gradient of the table is that of the logits, at most 1, by the kernel and the scale of 2^15.
        dense.assign(tf.fill(dense.shape, 100.0) * tf.constant([1.0, -1.0]))
        trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(1e-6), ENTROPY, backend=mesh.backend)
        trainer.fit(TABLE_ROWS, labels(), batch=8, epochs=1, verbose=False)
        optimizer = trainer.optimizer
        found = int(optimizer.iterations), float(optimizer.dynamic_scale)
        everyone = set(mesh.gather(repr(found).encode()))
        assert everyone == {repr((0, 2.0**14)).encode()}, everyone


class StopsOneRank(keras.callbacks.Callback):
    def __init__(self, here: bool) -> None:
        super().__init__()
        self.here = here

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = self.here


@computing_in("float64")
def check_a_callback_of_any_rank_stops_all(world: World) -> None:
    """Also one of a rank that shares its samples with another, which would wait for it."""
    with on_mesh(world, "tp=2") as mesh:
        trainer = hvdtrain.Trainer(split(mesh), "sgd", LOSS, backend=mesh.backend)
        result = trainer.fit(data(), epochs=3, callbacks=[StopsOneRank(mesh.session.world.rank == 1)], **FIT)
        assert result.epochs == 1
