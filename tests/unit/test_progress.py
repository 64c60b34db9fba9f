"""Metrics of an epoch that one training begins and another one ends."""

from dataclasses import asdict

import keras
import numpy as np
import pytest

from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.training.inputs import training_data
from hvdtrain.training.loop.loop import Plan
from hvdtrain.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("session")

RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 5)).astype("float32")
Y = np.argmax(X[:, :3], axis=1)


def step_of(metrics):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, activation="softmax")])
    trainer = Trainer(model, keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy", metrics())
    data = training_data((X, Y), trainer.backend, batch=16, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    step = trainer._factory.train_step(trainer.state, trainer.rule, data.batch, epoch_metrics=True)
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
    assert second.metric_sums()["accuracy"] == [0.0, 0.0]


def test_a_metric_that_is_new_begins_with_nothing():
    first, batches = step_of(two_metrics)
    first.begin_metrics()
    first(batches[0], measure=False)
    second, _ = step_of(lambda: ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(1, name="top1")])
    second.begin_metrics(first.metric_sums())
    assert second.metric_sums() == {"accuracy": first.metric_sums()["accuracy"], "top1": [0.0, 0.0]}


def test_callbacks_and_metrics_go_on_within_an_epoch(tmp_path):
    def trained(steps, resume=None, save=None):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, activation="softmax")])
        trainer = Trainer(model, keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", ["accuracy"])
        data = training_data((X, Y), trainer.backend, batch=16, seed=0, shuffle=True, steps_per_epoch=None)
        trainer.build(data)
        if resume is not None:
            trainer.restore(resume)
        stop = keras.callbacks.EarlyStopping(monitor="loss", patience=9, min_delta=10.0)
        result = trainer.train(data, Plan(steps, checkpoint_every=5), save=save, callbacks=[stop])
        return result, stop

    def save(state):
        Checkpointer(tmp_path).save(state.scalars.step, state.named_tensors(), asdict(state.scalars))

    expected, stop = trained(12)
    trained(5, save=save)
    resumed, again = trained(12, resume=tmp_path / "step-00000005")
    assert (stop.wait, stop.best) == (3, pytest.approx(expected.history["loss"][0]))
    assert (again.wait, again.best_epoch) == (stop.wait + 1, stop.best_epoch), "the cut epoch was shown as well"
    assert resumed.history["accuracy"][-3:] == pytest.approx(expected.history["accuracy"][-3:])
    assert resumed.history["loss"][-3:] == pytest.approx(expected.history["loss"][-3:], rel=1e-6)
    assert resumed.history["loss"][0] == pytest.approx(expected.history["loss"][0])
