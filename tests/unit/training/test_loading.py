"""Checkpoints of a user's own script, in one process: save, restore, resume, and what `fit` saves."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.checkpoint.naming import complete
from hvdtrain.cli.train import parse
from hvdtrain.config.errors import CheckpointError, ConfigError
from hvdtrain.runs.run import train
from hvdtrain.state.train_state import TrainState
from hvdtrain.training import core
from hvdtrain.training.elastic import Commits
from tests.builders import samples
from tests.extended import mostly_extended

pytestmark = pytest.mark.usefixtures("session")

X, Y = samples(50)
STEPS = 4
"""Of an epoch in batches of 16; the last one has two samples."""
QUIET = {"batch": 16, "verbose": 0}


def passes_of_any_length():
    """Return batches of which each pass holds others, and another number."""
    numbers = tf.data.Dataset.range(50).shuffle(50, seed=1).take(40).filter(lambda number: number < 30)
    return numbers.map(lambda number: (tf.gather(X, number), tf.gather(Y, number))).batch(4)


class Interrupted(Exception):
    pass


class InterruptAfter(keras.callbacks.Callback):
    """Fails in the middle of an epoch, as a job does that is killed."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise Interrupted


def trainer_of(*, built=True, optimizer="adam", seed=0, **options):
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((5,)), *layers] if built else layers)
    return hvdtrain.Trainer(model, optimizer, "sparse_categorical_crossentropy", ["accuracy"], seed=seed, **options)


def weights(trainer):
    return np.concatenate([weight.numpy().ravel() for weight in trainer.model.weights])


def same(one, other):
    return np.array_equal(weights(one), weights(other))


def interrupted(folder, after, *, epochs=3, trainer=None, callbacks=(), **options):
    trainer = trainer or trainer_of()
    with pytest.raises(Interrupted):
        trainer.fit(X, Y, epochs=epochs, **options, **QUIET, callbacks=[*callbacks, InterruptAfter(after)])
    return trainer


def steps_in(folder):
    return [int(path.name.removeprefix("step-")) for path in complete(folder)]


@pytest.fixture
def broadcasts(monkeypatch):
    """The steps after which a whole state was broadcast, with where it came from."""
    seen, broadcast, restore = [], TrainState.broadcast, core.restore

    def noted(state, backend, root=0):
        seen.append(("rank 0", state.scalars.step))
        broadcast(state, backend, root)

    def restored(path, tensors, ranks):
        seen.append(("a checkpoint", int(path.name.removeprefix("step-"))))
        return restore(path, tensors, ranks)

    monkeypatch.setattr(TrainState, "broadcast", noted)
    monkeypatch.setattr(core, "restore", restored)
    return seen


def test_the_state_is_broadcast_once_at_the_start_of_a_fit(tmp_path, broadcasts):
    def backup():
        return [keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=2)]

    interrupted(tmp_path, 3, callbacks=backup())
    assert broadcasts == [("rank 0", 0)]
    trainer_of().fit(X, Y, epochs=1, callbacks=backup(), **QUIET)
    assert broadcasts[1:] == [("a checkpoint", 2)]


def test_the_state_is_broadcast_once_at_the_start_of_a_run(session, tmp_path, broadcasts):
    words = ["digits", "--epochs", "1", "--max-steps", "2", "--plots", "False", "--tensorboard", "False"]
    folder = tmp_path / "run"
    train(session, parse(words).config, folder)
    assert broadcasts == [("rank 0", 0)]
    train(session, parse([*words[:-5], "3", *words[-4:]]).config, folder, resume="auto")
    assert broadcasts[1:] == [("a checkpoint", 2)]


def test_a_commit_of_an_elastic_training_is_broadcast_once(broadcasts):
    trainer, commits = trainer_of(), Commits()
    assert not trainer.restore_commit(commits)
    commits.keep(trainer.state, trainer.backend)
    before = weights(trainer)
    trainer.model.set_weights([weight * 0 for weight in trainer.model.get_weights()])
    assert trainer.restore_commit(commits)
    assert np.array_equal(weights(trainer), before)
    assert broadcasts == [("rank 0", 0)]


# -- a script that is run again goes on --


@pytest.mark.parametrize(
    "after", mostly_extended([3, 11], lambda after: after == 11, why="it has passes of other lengths behind it")
)
def test_a_training_on_passes_of_any_length_ends_as_one_at_a_stretch(tmp_path, after):
    def fit(trainer, *callbacks):
        saves = hvdtrain.Checkpoint(tmp_path, every=1)
        return trainer.fit(passes_of_any_length(), epochs=4, verbose=0, checkpoint=saves, callbacks=list(callbacks))

    whole = trainer_of()
    expected = whole.fit(passes_of_any_length(), epochs=4, verbose=0)
    assert expected.steps % 4, "passes differ in length"
    with pytest.raises(Interrupted):
        fit(trainer_of(), InterruptAfter(after))
    again = trainer_of()
    again.resume(tmp_path)
    assert fit(again).steps == expected.steps
    assert same(again, whole)


def test_a_training_of_an_unbuilt_model_that_is_resumed_ends_as_one_at_a_stretch(tmp_path):
    whole = trainer_of(built=False)
    expected = whole.fit(X, Y, epochs=3, validation_data=(X, Y), callbacks=[keras.callbacks.History()], **QUIET)
    saves = {"checkpoint": hvdtrain.Checkpoint(tmp_path, every=3), "validation_data": (X, Y)}
    interrupted(tmp_path, 8, trainer=trainer_of(built=False), **saves)
    assert steps_in(tmp_path) == [3, 6]

    again = trainer_of(built=False)
    assert again.resume(tmp_path) == tmp_path / "step-00000006"
    result = again.fit(X, Y, epochs=3, callbacks=[keras.callbacks.History()], **saves, **QUIET)
    assert same(again, whole)
    assert (result.steps, result.epochs) == (3 * STEPS, 3)
    assert result.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-6)
    assert result.history["val_accuracy"] == expected.history["val_accuracy"]


@pytest.mark.extended
class Counts(keras.layers.Layer):
    """Keeps numbers in variables that Keras does not track."""

    def __init__(self):
        super().__init__()
        self.calls = {"training": [tf.Variable(0.0, trainable=False)]}

    def call(self, inputs, training=False):
        if training:
            self.calls["training"][0].assign_add(1.0)
        return inputs * (1.0 + self.calls["training"][0])


def carrying():
    keras.utils.set_random_seed(7)
    layers = [keras.layers.LSTM(4, stateful=True), Counts(), keras.layers.Dense(1)]
    return hvdtrain.Trainer(keras.Sequential([keras.Input(batch_shape=(8, 5, 3)), *layers]), "sgd", "mse")


def test_states_that_layers_carry_from_batch_to_batch_go_on(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((32, 5, 3)), rng.standard_normal((32, 1))
    options = {"batch": 8, "shuffle": False, "epochs": 2, "verbose": 0}
    whole, part, resumed = carrying(), carrying(), carrying()
    whole.fit(x, y, **options)
    every = hvdtrain.Checkpoint(tmp_path, every=1)
    with pytest.raises(Interrupted):
        part.fit(x, y, checkpoint=every, callbacks=[InterruptAfter(6)], **options)
    resumed.resume(tmp_path)
    resumed.fit(x, y, checkpoint=every, **options)
    assert same(resumed, whole)
    lstm, counts, _ = resumed.model.layers
    np.testing.assert_array_equal(lstm.states[0], whole.model.layers[0].states[0])
    assert float(counts.calls["training"][0]) == 8


def test_without_a_checkpoint_resume_begins_at_the_start(tmp_path):
    trainer, plain = trainer_of(), trainer_of()
    assert trainer.resume(tmp_path / "none yet") is None
    trainer.fit(X, Y, epochs=1, checkpoint=str(tmp_path / "none yet"), **QUIET)
    plain.fit(X, Y, epochs=1, **QUIET)
    assert same(trainer, plain)
    assert steps_in(tmp_path / "none yet") == [STEPS]


@pytest.mark.extended
def test_a_training_that_is_finished_stays_as_it_is(tmp_path, capsys):
    first = trainer_of()
    first.fit(X, Y, epochs=2, checkpoint=tmp_path, **QUIET)
    again = trainer_of()
    again.resume(tmp_path)
    result = again.fit(X, Y, batch=16, epochs=2, checkpoint=tmp_path)
    assert same(first, again)
    assert (result.steps, result.epochs) == (2 * STEPS, 2)
    assert "there is nothing left to train: all of its epochs are trained (2 epochs)" in capsys.readouterr().out
    again.resume(tmp_path)
    again.fit(X, Y, epochs=3, checkpoint=tmp_path, **QUIET)
    first.fit(X, Y, epochs=3, initial_epoch=2, **QUIET)
    assert same(first, again), "more epochs go on"


@pytest.mark.extended  # several trainings
def test_a_training_that_a_callback_has_stopped_is_finished(tmp_path, capsys):
    def stopping():
        return keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0)

    first = trainer_of()
    first.fit(X, Y, epochs=9, checkpoint=tmp_path, callbacks=[stopping()], **QUIET)
    assert first.state.scalars.epoch == 2
    again = trainer_of()
    again.resume(tmp_path)
    again.fit(X, Y, batch=16, epochs=9, checkpoint=tmp_path, callbacks=[stopping()])
    assert same(first, again)
    assert "nothing left to train: a callback stopped it (2 epochs)" in capsys.readouterr().out
    again.restore(tmp_path)
    again.fit(X, Y, epochs=1, **QUIET)
    assert again.state.scalars.epoch == 3, "restore begins a new training"


@pytest.mark.extended  # several trainings
def test_best_weights_that_a_callback_holds_go_on(tmp_path):
    def stopping():
        # No epoch after the first improves on it by as much: it is the best, long before the checkpoint.
        return keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=9, restore_best_weights=True)

    first_epoch = []
    noting = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: first_epoch.append(weights(trainer)))
    trainer = trainer_of()
    interrupted(tmp_path, 2 * STEPS + 2, trainer=trainer, callbacks=[stopping(), noting], checkpoint=tmp_path)
    for script in ("goes on", "is finished"):
        again = trainer_of()
        again.resume(tmp_path)
        again.fit(X, Y, epochs=3, callbacks=[stopping()], checkpoint=tmp_path, **QUIET)
        assert np.array_equal(weights(again), first_epoch[0]), script
    again.restore(tmp_path)
    assert not np.array_equal(weights(again), first_epoch[0]), "a checkpoint holds what is trained, too"


@pytest.mark.extended  # several trainings
def test_each_of_two_fits_goes_on_in_its_own_folder_and_counts_its_own_epochs(tmp_path):
    def script(trainer, *callbacks):
        seen = []
        counting = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
        trainer.resume(tmp_path / "head")
        trainer.fit(X, Y, epochs=1, checkpoint=tmp_path / "head", **QUIET)
        trainer.resume(tmp_path / "all")
        callbacks = [counting, *callbacks]
        trainer.fit(X, Y, epochs=7, initial_epoch=5, checkpoint=tmp_path / "all", callbacks=callbacks, **QUIET)
        return seen

    whole, again = trainer_of(), trainer_of()
    whole.fit(X, Y, epochs=1, **QUIET)
    whole.fit(X, Y, epochs=7, initial_epoch=5, **QUIET)
    with pytest.raises(Interrupted):
        script(trainer_of(), InterruptAfter(STEPS + 2))
    assert script(again) == [6]
    assert same(again, whole)


# -- what a training goes on with --


def test_other_data_another_order_and_another_model_are_refused(tmp_path):
    interrupted(tmp_path, 5, checkpoint=tmp_path)
    again = trainer_of()
    for change, cause in (
        ({"x": X + 1}, "Received: samples with other values"),
        ({"x": X[:40], "y": Y[:40]}, "steps per epoch 3 now and 4 before"),
        ({"batch": 10}, "samples per step over all ranks 10 now and 16 before"),
        ({"shuffle": False}, "shuffle False now and True before"),
    ):
        again.resume(tmp_path)
        with pytest.raises(CheckpointError, match=cause):
            again.fit(**{"x": X, "y": Y, "epochs": 3, "checkpoint": tmp_path, **QUIET, **change})
    other = trainer_of(seed=1)
    other.resume(tmp_path)
    with pytest.raises(CheckpointError, match="seed 1 now and 0 before"):
        other.fit(X, Y, epochs=3, **QUIET)
    with pytest.raises(CheckpointError, match="is of another model or optimizer"):
        trainer_of(optimizer="sgd").resume(tmp_path)
    with pytest.raises(CheckpointError, match=rf"step 4, in a training that begins at step 0.*resume\('{tmp_path}'\)"):
        trainer_of().fit(X, Y, epochs=3, checkpoint=tmp_path, **QUIET)
    assert steps_in(tmp_path) == [STEPS]


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("in the way")
    trainer = trainer_of()
    with pytest.raises(CheckpointError, match="Checkpoints cannot be written to"):
        trainer.fit(X, Y, checkpoint=tmp_path / "file" / "inside", **QUIET)
    assert trainer.state.scalars.step == 0


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"folder": ""}, "must be the path of a folder"),
        ({"folder": "a", "every": 0}, "Checkpoint: every must be at least 1. Received: 0"),
        ({"folder": "a", "every": 2.5}, "Checkpoint: every must be at least 1. Received: 2.5"),
        ({"folder": "a", "keep": 0}, "Checkpoint: keep must be at least 1"),
        ({"folder": "a", "mode": "max"}, "mode='max' does not go with best=None"),
        ({"folder": "a", "best": "wins"}, "Received: 'wins'.* Correct the name, or set mode to min or max"),
        ({"folder": "a", "best": "loss", "mode": "up"}, "must be one of auto, min, max. Received: 'up'"),
    ],
)
def test_options_of_checkpoints_are_checked(options, cause):
    with pytest.raises(ConfigError, match=cause):
        hvdtrain.Checkpoint(**options)


def test_fit_refuses_what_is_no_checkpoint_and_a_metric_that_it_lacks(tmp_path):
    with pytest.raises(
        ConfigError, match=r"checkpoint is an hvdtrain.Checkpoint, or the path of a folder. Received: 5"
    ):
        trainer_of().fit(X, Y, checkpoint=5, **QUIET)
    with pytest.raises(ConfigError, match=r"Received: 'val_loss'. It has loss, accuracy. Those that begin with val_"):
        trainer_of().fit(X, Y, checkpoint=hvdtrain.Checkpoint(tmp_path, best="val_loss"), **QUIET)


# -- save and restore --


def test_what_is_saved_is_restored_and_evaluated(tmp_path, capsys):
    first = trainer_of()
    first.fit(X, Y, epochs=2, **QUIET)
    assert first.save(tmp_path) == tmp_path / f"step-{2 * STEPS:08d}"
    expected = first.evaluate(X, Y, verbose=0, return_dict=True)["loss"]
    other = trainer_of()
    assert other.restore(tmp_path) == tmp_path / f"step-{2 * STEPS:08d}"
    assert other.evaluate(X, Y, verbose=0, return_dict=True)["loss"] == expected
    for use in ("evaluate", "predict"):
        unbuilt = trainer_of(built=False)
        with pytest.raises(ConfigError, match="no variables to save yet: call fit, evaluate or predict before save"):
            unbuilt.save(tmp_path)
        unbuilt.restore(tmp_path)
        assert "the model has no variables yet: fit, evaluate or predict will load" in capsys.readouterr().err
        if use == "evaluate":
            assert unbuilt.evaluate(X, Y, verbose=0, return_dict=True)["loss"] == expected
        else:
            assert np.array_equal(unbuilt.predict(X), first.predict(X))
        assert same(unbuilt, first)
    damaged = tmp_path / f"step-{2 * STEPS:08d}"
    (damaged / "index.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        trainer_of(built=False).restore(damaged)
    capsys.readouterr()
    with pytest.raises(CheckpointError, match=f"No checkpoint in {tmp_path} is good: damaged are {damaged.name}\\."):
        trainer_of(built=False).resume(tmp_path)
    assert f"{damaged} is damaged: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [damaged.name]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("built", [True, False])
def test_a_trainer_without_an_optimizer_restores_the_weights_of_a_run_with_one(tmp_path, built, scaled):
    adam = keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5)
    optimizer = hvdtrain.LossScaleOptimizer(adam, initial_scale=4.0) if scaled else adam
    trainer = trainer_of(optimizer=optimizer)
    trainer.fit(X, Y, epochs=2, checkpoint=str(tmp_path), **QUIET)
    other = trainer_of(optimizer=None, built=built)
    other.restore(str(tmp_path))
    np.testing.assert_array_equal(other.predict(X, verbose=0), trainer.predict(X, verbose=0))
    assert other.evaluate(X, Y, verbose=0) == trainer.evaluate(X, Y, verbose=0)
    with pytest.raises(ConfigError, match="An optimizer is needed"):
        other.fit(X, Y, **QUIET)


def test_the_weights_of_another_model_are_refused_without_an_optimizer_too(tmp_path):
    trainer_of().fit(X, Y, checkpoint=str(tmp_path), **QUIET)
    other = hvdtrain.Trainer(keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)]), None, "mse")
    with pytest.raises(CheckpointError, match="model/layers/0/kernel: saved"):
        other.restore(str(tmp_path))


def test_the_best_epoch_is_restored_by_its_name(tmp_path):
    trainer, seen = trainer_of(optimizer=keras.optimizers.SGD(0.5)), {}

    class Climb(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen[epoch] = weights(trainer)
            self.model.optimizer.learning_rate = -0.5 if epoch else 0.5

    saves = hvdtrain.Checkpoint(tmp_path, keep=1, best="val_loss")
    result = trainer.fit(X, Y, epochs=4, validation_data=(X, Y), checkpoint=saves, callbacks=[Climb()], **QUIET)
    losses = [record.loss for record in result.evaluations]
    best = int(np.argmin(losses))
    assert best == 1
    assert steps_in(tmp_path) == [2 * STEPS, 4 * STEPS]
    other = trainer_of(optimizer=keras.optimizers.SGD(0.5))
    other.restore(tmp_path, "best")
    assert np.array_equal(weights(other), seen[best])
    assert other.evaluate(X, Y, verbose=0, return_dict=True)["loss"] == pytest.approx(losses[best], rel=1e-6)
    assert other.restore(tmp_path, which=4 * STEPS).name == f"step-{4 * STEPS:08d}"
    with pytest.raises(CheckpointError, match=r"is a single checkpoint: leave out which. Received: 'best'"):
        other.restore(tmp_path / f"step-{4 * STEPS:08d}", "best")
    with pytest.raises(CheckpointError, match="There is no complete checkpoint in"):
        other.restore(tmp_path / "elsewhere")


# -- BackupAndRestore --


@pytest.mark.extended  # several trainings
def test_a_backup_goes_on_and_is_removed_at_the_end(tmp_path):
    whole = trainer_of()
    whole.fit(X, Y, epochs=3, **QUIET)

    def backup():
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    interrupted(tmp_path, 6, callbacks=[backup()])
    assert steps_in(tmp_path / "backup") == [STEPS]
    again = trainer_of()
    again.fit(X, Y, epochs=3, callbacks=[[backup()]], **QUIET)
    assert same(again, whole)
    assert not (tmp_path / "backup").exists()


def test_backups_that_cannot_work_are_refused(tmp_path):
    def fit(*callbacks, **options):
        trainer_of().fit(X, Y, callbacks=list(callbacks), **options, **QUIET)

    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(ConfigError, match=r"by BackupAndRestore.* or by checkpoint=.* Received: both"):
        fit(backup, checkpoint=tmp_path / "other")
    with pytest.raises(ConfigError, match=r"fit takes one BackupAndRestore. Received: 2"):
        fit(backup, keras.callbacks.BackupAndRestore(tmp_path / "b"))
    with pytest.raises(ConfigError, match=r'is "epoch" or a number of steps, at least 1. Received: False'):
        fit(keras.callbacks.BackupAndRestore(tmp_path, save_freq=False))
    (tmp_path / "latest.weights.h5").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"Received: .*latest.weights.h5, by Keras' own fit\(\)"):
        fit(backup)
