"""Metrics of an epoch that one training begins and another one ends."""

import keras
import numpy as np
import pytest

from hvdtrain.training.inputs import training_data
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
