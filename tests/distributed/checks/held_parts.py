"""What ranks that hold parts of one model must have in common: noticed where it differs, and decided together."""

from typing import Any

import keras
import numpy as np
from checks.hybrids import FIT, LOSS, data, split
from meshes import on_mesh
from world import World

import hvdtrain
from hvdtrain.config.errors import ConfigError, DesyncError


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


def check_a_part_that_drifts_is_named(world: World) -> None:
    """Slices are compared among those that hold the same ones, and what is whole among all."""
    cases = {
        2: [("tp=2", "norm/gamma", 0), ("tp=2", "up/kernel", None)],
        4: [("dp=2,ep=2", "experts/kernel_in", 1)],
    }
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


def check_no_file_is_written_of_slices(world: World) -> None:
    """Neither by the user nor by a callback, also where experts or tables are all that is split."""

    def table() -> keras.Model:
        return keras.Sequential([keras.Input((3,), dtype="int32"), hvdtrain.ShardedEmbedding(10, 4, "row")])

    with on_mesh(world, "ep=2") as mesh:
        for number, build in enumerate((lambda: split(mesh), table)):
            model = build()
            for write, name in ((model.save, "model.keras"), (model.save_weights, "model.weights.h5")):
                file = world.folder / f"rank{world.rank}-{number}-{name}"
                try:
                    write(file)
                except ConfigError as error:
                    assert "none can write the model by itself" in str(error)
                else:
                    raise AssertionError(f"{file} was written")


class StopsOneRank(keras.callbacks.Callback):
    def __init__(self, here: bool) -> None:
        super().__init__()
        self.here = here

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = self.here


def check_a_callback_of_any_rank_stops_all(world: World) -> None:
    """Also one of a rank that shares its samples with another, which would wait for it."""
    with on_mesh(world, "tp=2") as mesh:
        trainer = hvdtrain.Trainer(split(mesh), "sgd", LOSS, backend=mesh.backend)
        result = trainer.fit(data(), epochs=3, callbacks=[StopsOneRank(mesh.session.world.rank == 1)], **FIT)
        assert result.epochs == 1
