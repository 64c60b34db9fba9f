"""What a tracker is told by `fit`, by which names, and what becomes of one that fails."""

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.observability.events import RunInfo
from hvdtrain.observability.tracker import Tracker

INFO = RunInfo(
    recipe="tiny",
    backend="horovod",
    world_size=2,
    launcher="mpirun",
    controller="mpi",
    global_batch=8,
    per_replica_batch=4,
    total_steps=10,
    steps_per_epoch=5,
    parameters=15,
)


class Recorder(Tracker):
    """Keeps what it is told; fails where it is told to."""

    def __init__(self, fails="", **parameters):
        super().__init__(parameters)
        self.fails, self.begun, self.figures, self.ends = fails, [], [], []

    @property
    def output(self):
        return "The recorder"

    def _attempt(self, what):
        if self.fails == what:
            raise RuntimeError(f"cannot {what}")

    def begin(self, training, name, parameters):
        self._attempt("begin")
        self.begun.append((training, name, parameters))

    def write(self, figures, step):
        self._attempt("write")
        self.figures.append((step, figures))

    def end(self, results):
        self.ends.append(results)

    def interrupt(self):
        self.ends.append("interrupted")


def fitted(recorder, *others, epochs=2, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)], name="tiny")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = np.random.default_rng(0).random((40, 4), "float32"), np.arange(40) % 3
    trainer = hvdtrain.Trainer(model, "sgd", loss, metrics=["accuracy"])
    arguments = {"batch": 8, "epochs": epochs, "verbose": 0, "validation_data": (x, y), "log_every": 2} | options
    return trainer, trainer.fit(x, y, callbacks=[recorder, *others], **arguments)


@pytest.mark.usefixtures("session")
def test_a_tracker_has_the_parameters_the_steps_and_keras_figures_of_epochs():
    recorder = Recorder(team={"name": "a"})
    trainer, result = fitted(recorder)
    ((training, name, parameters),) = recorder.begun
    assert (name, parameters["global_batch"], parameters["team"]) == ("tiny", 8, {"name": "a"})
    assert parameters["total_steps"] == 10
    steps = [(step, figures["train/loss"]) for step, figures in recorder.figures if "train/loss" in figures]
    assert [step for step, _ in steps] == [1, 2, 4, 5, 6, 8, 10]
    assert recorder.figures[0][1].keys() >= {
        "train/accuracy",
        "train/learning_rate",
        "train/samples_per_second",
        "epoch",
    }
    epochs = [(step, figures) for step, figures in recorder.figures if "val_loss" in figures]
    assert [step for step, _ in epochs] == [5, 10]
    assert [figures["epoch"] for _, figures in epochs] == [1, 2]
    for key in ("loss", "accuracy", "val_loss", "val_accuracy"):
        np.testing.assert_allclose([figures[key] for _, figures in epochs], result.history[key], rtol=1e-6)
    (results,) = recorder.ends
    assert results["steps"] == 10
    # A second fit goes on with the training, and with the run.
    trainer.fit(np.ones((8, 4)), np.ones(8), batch=8, callbacks=[recorder], verbose=0)
    assert [begun[0] for begun in recorder.begun] == [training, training]


@pytest.mark.usefixtures("session")
def test_a_run_goes_on_with_its_training(tmp_path):
    first, second, other = Recorder(), Recorder(), Recorder()
    fitted(first, epochs=1, checkpoint=tmp_path / "saved")
    fitted(other, epochs=1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    trainer = hvdtrain.Trainer(model, "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trainer.resume(tmp_path / "saved")
    x, y = np.random.default_rng(0).random((40, 4), "float32"), np.arange(40) % 3
    trainer.fit(x, y, batch=8, epochs=2, callbacks=[second], verbose=0)
    assert second.begun[0][0] == first.begun[0][0] != other.begun[0][0]
    assert second.begun[0][2]["start_step"] == 5


@pytest.mark.usefixtures("session")
def test_a_tracker_that_cannot_begin_is_an_error_and_one_that_fails_later_is_left(caplog):
    with pytest.raises(ConfigError, match="The recorder cannot begin a run: cannot begin"):
        fitted(Recorder(fails="begin"))
    recorder = Recorder(fails="write")
    _, result = fitted(recorder)
    assert result.steps == 10
    said = [record.message for record in caplog.records if "The recorder" in record.message]
    assert said == ["The recorder cannot be written any more (cannot write). Training goes on without it."]
    assert recorder.ends == ["interrupted"]


class Mistake(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise ValueError("a mistake")


@pytest.mark.usefixtures("session")
def test_a_tracker_that_fails_at_the_end_hides_no_mistake(caplog):
    class Down(Recorder):
        def interrupt(self):
            raise RuntimeError("down")

    with pytest.raises(ValueError, match="a mistake"):
        fitted(Down(), Mistake())
    assert "The recorder cannot end the run: down" in [record.message for record in caplog.records]


@pytest.mark.usefixtures("session")
def test_another_training_is_another_run():
    recorder = Recorder()
    fitted(recorder, epochs=1)
    fitted(recorder, epochs=1)
    (first, *_), (second, *_) = recorder.begun
    assert first != second


def test_keras_own_fit_is_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match=r"Recorder is for hvdtrain.Trainer\(model\).fit: Model.fit tells it nothing"):
        model.fit(np.ones((4, 4)), np.ones((4, 3)), callbacks=[Recorder()], verbose=0)


def test_a_later_world_goes_on_without_a_tracker(caplog):
    recorder = Recorder(fails="begin")
    recorder.prepare(10, required=False)
    recorder.on_start(INFO)
    recorder.on_end({"steps": 1})
    recorder.close()
    assert (recorder.figures, recorder.ends) == ([], [])
    assert caplog.records[0].message == "The recorder cannot begin a run: cannot begin. Training goes on without it."


@pytest.mark.usefixtures("session")
def test_a_training_that_fails_is_an_interrupted_run():
    recorder = Recorder()
    with pytest.raises(ValueError, match="a mistake"):
        fitted(recorder, Mistake())
    assert recorder.ends == ["interrupted"]


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"MlflowTracker needs .*pip install 'hvdtrain\[mlflow\]'"):
        hvdtrain.MlflowTracker()
