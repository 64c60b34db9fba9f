"""Scripts that were interrupted and are run again: on ranks of which only the first sees the checkpoints."""

import contextlib
import io
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from checks.calls import refusal
from checks.training import CROSSENTROPY, classifier, samples
from world import World, flat_bytes
from worlds import worlds

import hvdtrain
from hvdtrain.cli.train import parse
from hvdtrain.config.errors import CheckpointError, ConfigError
from hvdtrain.runs.run import train
from hvdtrain.runtime.session import current
from hvdtrain.training.update_rules.zero.shards import SMALL_BYTES

DATA = samples(50)
FIT = {"batch": 16, "epochs": 3, "verbose": 0}
"""Four steps an epoch, the last one of two samples."""


class Interrupted(Exception):
    pass


class InterruptAfter(keras.callbacks.Callback):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise Interrupted


def trainer_of(world: World, **options: Any) -> Any:
    return hvdtrain.Trainer(classifier(0), "adam", CROSSENTROPY, ["accuracy"], backend=world.backend, **options)


@contextlib.contextmanager
def in_a_folder_of_its_own(world: World, name: str) -> Iterator[Path]:
    """Enter a folder that no other rank sees by the name that they give it."""
    folder = world.folder / f"{name}-{world.rank}"
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        yield folder


def interrupted(world: World, after: int, callbacks: Sequence[Any] = (), data: Any = DATA, **options: Any) -> None:
    try:
        trainer_of(world).fit(data, **{**FIT, **options}, callbacks=[*callbacks, InterruptAfter(after)])
    except Interrupted:
        return
    raise AssertionError("it was not interrupted")


def first_epoch() -> Any:
    """Return a callback that takes the first epoch for the best, and brings back its weights."""
    return keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=9, restore_best_weights=True)


def at_a_stretch(world: World, **options: Any) -> bytes:
    trainer = trainer_of(world)
    trainer.fit(DATA, **FIT, **options)
    return flat_bytes(trainer.model.get_weights())


@worlds("mpirun-2", extended=True)
def check_a_training_goes_on_where_only_rank_0_sees_its_checkpoints(world: World) -> None:
    with in_a_folder_of_its_own(world, "goes-on") as folder:
        saves = hvdtrain.Checkpoint("saved", every=3, best="val_loss")
        interrupted(world, 8, [first_epoch()], checkpoint=saves, validation_data=DATA)
        assert (folder / "saved").exists() == (world.rank == 0)
        again = trainer_of(world)
        found = again.resume("saved")
        assert found is not None
        assert found.name == "step-00000006", found
        again.fit(DATA, **FIT, checkpoint=saves, validation_data=DATA, callbacks=[first_epoch()])
        assert flat_bytes(again.model.get_weights()) == at_a_stretch(world, callbacks=[first_epoch()])
        assert world.same_everywhere(flat_bytes(again.model.get_weights()))

        fresh = trainer_of(world)
        fresh.restore("saved", "best")
        assert fresh.state.scalars.step == again.state.scalars.best["step"]
        assert (
            fresh.evaluate(DATA, batch=FIT["batch"], verbose=0, return_dict=True)["loss"]
            == again.state.scalars.best["value"]
        )
        assert trainer_of(world).resume("nowhere") is None


@worlds("mpirun-2", extended=True)
def check_a_training_on_each_ranks_own_samples_goes_on(world: World) -> None:
    with in_a_folder_of_its_own(world, "own-samples"):
        own = tuple(part[world.rank :: world.size] for part in DATA)
        options = {**FIT, "shard": "rank"}
        interrupted(world, 6, data=own, shard="rank", checkpoint="saved")
        again, whole = trainer_of(world), trainer_of(world)
        again.resume("saved")
        again.fit(own, **options, checkpoint="saved")
        whole.fit(own, **options)
        assert flat_bytes(again.model.get_weights()) == flat_bytes(whole.model.get_weights())
        again.resume("saved")
        other = tuple(part[1 - world.rank :: world.size] for part in DATA)
        assert "samples with other values" in failed(world, lambda: again.fit(other, **options))


@worlds("mpirun-2", extended=True)
def check_a_backup_on_rank_0_alone_takes_all_ranks_with_it(world: World) -> None:
    with in_a_folder_of_its_own(world, "backup") as folder:
        mine = [keras.callbacks.BackupAndRestore("backup", save_freq=3)] if world.rank == 0 else []
        interrupted(world, 5, mine)
        assert (folder / "backup" / "step-00000003").exists() == (world.rank == 0)
        again = trainer_of(world)
        again.fit(DATA, **FIT, callbacks=mine)
        assert flat_bytes(again.model.get_weights()) == at_a_stretch(world)
        assert not (folder / "backup").exists()
        other = [keras.callbacks.BackupAndRestore(f"backup-{world.rank}")]
        said = refusal(world, lambda: trainer_of(world).fit(DATA, **FIT, callbacks=other))
        assert "on rank 1 and" in said, said
        said = refusal(world, lambda: trainer_of(world).fit(DATA, **FIT, callbacks=other if world.rank else []))
        assert "on rank 1 and none on rank 0" in said, said


@worlds("mpirun-2", extended=True)
def check_a_full_disk_leaves_the_last_good_checkpoint(world: World) -> None:
    with in_a_folder_of_its_own(world, "full") as folder:
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

        def filling(name: str, epochs: Sequence[int]) -> Any:
            def fill(epoch: int, logs: Any = None) -> None:
                while list(folder.glob(f"{name}/.step-*")):
                    time.sleep(0.02)  # the epoch before is still being written
                limit = 100 if epoch in epochs and world.rank == 0 else unlimited[0]
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))

            return keras.callbacks.LambdaCallback(on_epoch_begin=fill)

        full = "The checkpoint saved/step-{:08} cannot be written: [Errno 27] File too large"
        try:
            # Where the disk has room again, the training has lost nothing but a checkpoint.
            warned, trainer = io.StringIO(), trainer_of(world)
            with contextlib.redirect_stderr(warned):
                saves = hvdtrain.Checkpoint("passing", best="accuracy", keep=1)
                trainer.fit(DATA, **FIT, callbacks=[filling("passing", [1])], checkpoint=saves)
            expected = flat_bytes(trainer.model.get_weights())
            assert expected == at_a_stretch(world)
            assert (full.format(8).replace("saved", "passing") in warned.getvalue()) == (world.rank == 0)
            assert trainer.state.scalars.best["step"] in (4, 12), "a best one that is there"
            # At the end of training it is an error.
            said = failed(
                world,
                lambda: trainer_of(world).fit(DATA, **FIT, callbacks=[filling("saved", [1, 2])], checkpoint="saved"),
            )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert full.format(12) in said, said
        if world.rank == 0:
            assert [path.name for path in (folder / "saved").iterdir()] == ["step-00000004"]
        again = trainer_of(world)
        again.resume("saved")
        again.fit(DATA, **FIT, checkpoint="saved")
        assert flat_bytes(again.model.get_weights()) == expected


@worlds("mpirun-2", extended=True)
def check_a_model_without_variables_is_restored_when_it_has_them(world: World) -> None:
    with in_a_folder_of_its_own(world, "unbuilt"):

        def unbuilt(seed: int) -> Any:
            keras.utils.set_random_seed(seed)
            model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(4)])
            return hvdtrain.Trainer(model, "adam", CROSSENTROPY, backend=world.backend)

        first = unbuilt(1)
        first.fit(DATA, batch=16, verbose=0)
        first.save("saved")
        expected = first.predict(DATA[0])
        for use in ("predict", "evaluate"):
            other = unbuilt(2 + world.rank)
            other.restore("saved")
            if use == "evaluate":
                other.evaluate(DATA, verbose=0)
            assert np.array_equal(other.predict(DATA[0]), expected), use


def check_a_model_with_its_own_step_goes_on(world: World) -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    def unbuilt() -> Any:
        keras.utils.set_random_seed(0)
        model = Own()
        model.compile("adam", CROSSENTROPY, metrics=["accuracy"])
        return hvdtrain.Trainer(model, backend=world.backend)

    with in_a_folder_of_its_own(world, "own-step"):
        saves = hvdtrain.Checkpoint("saved", every=3, best="val_accuracy")
        files = [keras.callbacks.ModelCheckpoint("model.weights.h5", save_weights_only=True, save_freq=6)]
        whole, again = unbuilt(), unbuilt()
        whole.fit(DATA, **FIT)
        try:
            unbuilt().fit(DATA, **FIT, checkpoint=saves, validation_data=DATA, callbacks=[*files, InterruptAfter(8)])
        except Interrupted:
            assert Path("model.weights.h5").exists() == (world.rank == 0), "Keras' own files are rank 0's"
        again.resume("saved")
        again.fit(DATA, **FIT, checkpoint=saves, validation_data=DATA)
        assert flat_bytes(again.model.get_weights()) == flat_bytes(whole.model.get_weights())
        assert again.state.scalars.best["metric"] == "val_accuracy"


@worlds("mpirun-2", extended=True)
def check_what_ranks_cannot_save_is_refused_before_the_first_step(world: World) -> None:
    with in_a_folder_of_its_own(world, "refused") as folder:
        trainer = trainer_of(world)
        said = refusal(world, lambda: trainer.fit(DATA, **FIT, checkpoint=f"saved-{world.rank}"))
        assert "checkpoint is Checkpoint(folder='saved-0'" in said, said
        said = refusal(world, lambda: trainer.resume(f"saved-{world.rank}"))
        assert "folder is 'saved-0' on rank 0 but 'saved-1' on rank 1" in said, said
        said = refusal(world, lambda: trainer.save("a") if world.rank else trainer.resume("a"))
        assert "the call is resume() on rank 0 but save() on rank 1" in said, said
        if world.rank == 0:
            (folder / "file").write_text("in the way")
        said = failed(world, lambda: trainer.fit(DATA, **FIT, checkpoint="file/saved"))
        assert "Checkpoints cannot be written to file/saved" in said, said
        assert trainer.state.scalars.step == 0
        interrupted(world, 5, checkpoint="saved")
        trainer.resume("saved")
        other = (DATA[0] + 1, DATA[1])
        said = failed(world, lambda: trainer.fit(other, **FIT, checkpoint="saved"))
        assert "Received: samples with other values" in said, said


@worlds("mpirun-2")
def check_slices_that_ranks_cannot_save_together_are_refused_before_the_first_step(world: World) -> None:
    with in_a_folder_of_its_own(world, "unshared"):
        wide = keras.Sequential([keras.Input((5,)), keras.layers.Dense(SMALL_BYTES // 8), keras.layers.Dense(3)])
        sharded = hvdtrain.Trainer(wide, "adam", CROSSENTROPY, backend=world.backend, zero=1)
        said = failed(world, lambda: sharded.fit(DATA, **FIT, checkpoint="saved"))
        assert "must be one that all ranks share" in said, said
        assert sharded.state.scalars.step == 0
        words = ["digits", "--zero", "1", "--epochs", "1", "--plots", "False", "--tensorboard", "False"]
        config = parse([*words, "--model-args", "width", str(SMALL_BYTES // 64)]).config
        said = failed(world, lambda: train(current(), config, Path("run")))
        assert "must be one that all ranks share" in said, said
        assert not list(Path("run").glob("metrics.jsonl")), "no step was taken"


def failed(world: World, call: Any) -> str:
    """Return what rank 0 says where a call fails on all ranks; the others name the rank that it failed on."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    except ConfigError as error:
        raise AssertionError(str(error)) from error
    raise AssertionError("not refused")
