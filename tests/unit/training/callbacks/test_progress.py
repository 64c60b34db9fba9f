"""Metrics of an epoch that one training begins and another one ends."""

from dataclasses import asdict

import keras
import pytest

from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.config.errors import ConfigError
from hvdtrain.training.inputs import training_data
from hvdtrain.training.plan import Plan
from hvdtrain.training.trainer import Trainer
from tests.builders import dense, samples

pytestmark = pytest.mark.usefixtures("session")

X, Y = samples(40)


def step_of(metrics):
    model = dense(activation="softmax")
    trainer = Trainer(model, keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy", metrics())
    data = training_data((X, Y), trainer.backend, batch=16, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    step = trainer.factory.train_step(trainer.state, trainer.rule, data.batch)
    return step, [batch for batch, _ in zip(data.batches(0), range(3), strict=False)]


def two_metrics():
    return ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")]


def test_the_sums_of_a_begun_epoch_are_taken_up():
    whole, batches = step_of(two_metrics)
    whole.begin_metrics()
    for batch in batches:
        whole(batch, measure=False)
    expected = whole.epoch_metrics()

    first, _ = step_of(two_metrics)
    first.begin_metrics()
    for batch in batches[:2]:
        first(batch, measure=False)
    sums = first.metric_sums()
    assert sums == first.metric_sums(), "looking changes nothing"
    assert sums["accuracy"][1] == 32.0

    second, _ = step_of(two_metrics)
    second.begin_metrics(sums)
    second(batches[2], measure=False)
    assert second.epoch_metrics() == pytest.approx(expected)
    second.begin_metrics()
    assert second.metric_sums()["accuracy"] == [0.0, 0.0]


def trained(steps, *callbacks, folder=None, resume=None):
    """Train to step `steps`, from the checkpoint `resume`, and save every fifth step and the last in `folder`."""
    model = dense(activation="softmax")
    trainer = Trainer(model, keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", ["accuracy"])
    data = training_data((X, Y), trainer.backend, batch=16, seed=0, shuffle=True, steps_per_epoch=None)
    trainer.build(data)
    if resume is not None:
        trainer.restore(resume)

    def save(state):
        Checkpointer(folder).save(state.scalars.step, state.named_tensors(), asdict(state.scalars))

    plan = Plan(steps, checkpoint_every=5)
    return trainer.train(data, plan, save=None if folder is None else save, callbacks=callbacks)


def stopping(**options):
    return keras.callbacks.EarlyStopping(monitor="loss", patience=9, min_delta=10.0, **options)


def test_callbacks_and_metrics_go_on_within_an_epoch(tmp_path):
    stop, again = stopping(), stopping()
    expected = trained(12, stop)
    trained(5, stopping(), folder=tmp_path)
    resumed = trained(12, again, resume=tmp_path / "step-00000005")
    assert (stop.wait, stop.best) == (3, pytest.approx(expected.history["loss"][0]))
    assert (again.wait, again.best_epoch) == (stop.wait + 1, stop.best_epoch), "the cut epoch was shown as well"
    assert resumed.history["accuracy"][-3:] == pytest.approx(expected.history["accuracy"][-3:])
    assert resumed.history["loss"][-3:] == pytest.approx(expected.history["loss"][-3:], rel=1e-6)
    assert resumed.history["loss"][0] == pytest.approx(expected.history["loss"][0])


@pytest.mark.extended
def test_a_callback_of_a_users_own_may_keep_what_it_likes(tmp_path):
    class Keeping(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.history, self.best, self.wait = {"loss": []}, {"loss": 1.0}, 0

        def on_epoch_end(self, epoch, logs=None):
            self.history["loss"].append(logs["loss"])
            self.wait += 1

    trained(5, Keeping(), folder=tmp_path)
    again = Keeping()
    trained(6, again, resume=tmp_path / "step-00000005")
    assert (again.best, again.wait, len(again.history["loss"])) == ({"loss": 1.0}, 3, 1)


def test_best_weights_of_before_the_checkpoint_are_refused(tmp_path):
    trained(5, stopping(restore_best_weights=True), folder=tmp_path)
    with pytest.raises(ConfigError, match=r"EarlyStopping with restore_best_weights=True cannot resume .* Pass Early"):
        trained(12, stopping(restore_best_weights=True), resume=tmp_path / "step-00000005")
    trained(12, stopping(), resume=tmp_path / "step-00000005")


class LastRate(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        self.rate = float(self.model.optimizer.learning_rate)


def test_a_rate_that_falls_at_the_beginning_of_an_epoch_falls_once(tmp_path):
    """The training is resumed in the second of three epochs."""
    falling = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    last = LastRate()
    trained(5, falling, folder=tmp_path)
    trained(9, falling, last, resume=tmp_path / "step-00000005")
    assert last.rate == pytest.approx(0.1 * 0.5**3)
