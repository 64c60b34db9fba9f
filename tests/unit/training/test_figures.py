"""Losses and metrics are named, ordered and formed as Keras' `fit` and `evaluate` do."""

import csv
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers.schedules import ExponentialDecay

from hvdtrain.config.checkpoint import Checkpoint
from hvdtrain.config.errors import ConfigError
from hvdtrain.observability.events import Observer, Observers
from hvdtrain.observability.jsonl import JsonlWriter
from hvdtrain.training.inputs import training_data, validation_batches
from hvdtrain.training.plan import Plan
from hvdtrain.training.trainer import Trainer
from tests.builders import dense, samples
from tests.extended import mostly_extended

pytestmark = pytest.mark.usefixtures("session")

RNG = np.random.default_rng(0)
X, CLASSES = samples(50)
ONE_HOT = np.eye(3, dtype="float32")[CLASSES]
SIZES = X.sum(axis=1, keepdims=True)
WEIGHTS = RNG.random(50).astype("float32")


def one_output():
    return dense(activation="softmax")


def two_outputs(as_dict=False):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4, kernel_regularizer="l2")(inputs)
    outputs = {
        "size": keras.layers.Dense(1, name="size")(hidden),
        "cls": keras.layers.Dense(3, activation="softmax", name="cls")(hidden),
    }
    return keras.Model(inputs, outputs if as_dict else list(outputs.values()))


def largestShare(labels, shares):  # Keras calls it largest_share
    return keras.ops.max(shares, axis=-1)


F1 = keras.metrics.F1Score
CASES = {
    "several losses": (
        lambda: two_outputs(as_dict=True),
        {
            "loss": {"size": "mse", "cls": "sparse_categorical_crossentropy"},
            "loss_weights": {"size": 0.25, "cls": 2.0},
            "metrics": {"cls": ["accuracy"], "size": ["mae"]},
            "weighted_metrics": {"cls": ["accuracy"]},
        },
        {"size": SIZES, "cls": CLASSES},
        WEIGHTS,
    ),
    "outputs in a list": (
        two_outputs,
        {"loss": ["mse", "sparse_categorical_crossentropy"], "metrics": [["mae", "mse"], "accuracy"]},
        [SIZES, CLASSES],
        None,
    ),
    "one loss for one of two outputs": (
        two_outputs,
        {"loss": ["mse", None], "metrics": [["mae"], ["accuracy"]]},
        [SIZES, CLASSES],
        None,
    ),
    "weighted and unweighted": (
        one_output,
        {
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["sparse_top_k_categorical_accuracy", "accuracy", "accuracy"],
            "weighted_metrics": ["accuracy", "accuracy"],
        },
        CLASSES,
        WEIGHTS,
    ),
    "functions": (
        one_output,
        {
            "loss": "sparse_categorical_crossentropy",
            "metrics": [largestShare],
            "weighted_metrics": [lambda labels, shares: keras.ops.mean(shares**2, axis=-1)],
        },
        CLASSES,
        WEIGHTS,
    ),
    "a value for each class": (
        one_output,
        {"loss": "categorical_crossentropy", "metrics": ["accuracy", F1(), F1(average="macro", name="macro")]},
        ONE_HOT,
        None,
    ),
}


class Batches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(dict(logs))


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "case",
    mostly_extended(
        CASES,
        lambda case: case == "several losses",
        why="several outputs; the losses and metrics of ranks are compared with Keras' in a launch",
    ),
)
def test_every_figure_is_that_of_keras(case):
    build, objective, targets, weights = CASES[case]
    # Batches of one size: with a shorter last one Keras' mean of an output's loss is not that over the samples.
    options = {"batch_size": 25, "epochs": 2, "shuffle": False, "verbose": 0, "sample_weight": weights}
    options |= {"validation_data": (X[:20], _first(targets, 20))}
    model = build()
    model.compile(keras.optimizers.SGD(0.1), **_fresh(objective))
    theirs, ours = Batches(), Batches()
    expected = model.fit(X, targets, callbacks=[theirs], **options)
    trainer = Trainer(build(), keras.optimizers.SGD(0.1), **_fresh(objective))
    found = trainer.fit(X, targets, callbacks=[ours], **options)
    assert_same(found.history, expected.history)
    assert found.epoch == expected.epoch == [0, 1]
    for mine, other in zip(ours.seen, theirs.seen, strict=True):
        assert_same(mine, other)
    outcome = trainer.evaluate(X, targets, 25, 0, weights, return_dict=True)
    evaluated = {"batch_size": 25, "sample_weight": weights, "verbose": 0}
    assert_same(dict(sorted(outcome.items())), model.evaluate(X, targets, return_dict=True, **evaluated))
    for mine, other in zip(
        trainer.evaluate(X, targets, 25, 0, weights), model.evaluate(X, targets, **evaluated), strict=True
    ):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=1e-6)


def _first(targets, count):
    if isinstance(targets, dict):
        return {name: values[:count] for name, values in targets.items()}
    return [values[:count] for values in targets] if isinstance(targets, list) else targets[:count]


def _fresh(objective):
    """Return `objective` with metrics that have counted nothing."""
    metrics = objective.get("metrics")
    if not isinstance(metrics, list):
        return dict(objective)
    copies = [m.from_config(m.get_config()) if isinstance(m, keras.metrics.Metric) else m for m in metrics]
    return {**objective, "metrics": copies}


def test_one_metric_object_that_is_listed_twice_counts_as_in_keras():
    def compiled():
        model, metric = one_output(), keras.metrics.SparseCategoricalAccuracy(name="right")
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=[metric], weighted_metrics=[metric])
        return model

    expected = compiled().evaluate(X, CLASSES, sample_weight=WEIGHTS, verbose=0, return_dict=True)
    found = Trainer(compiled()).evaluate(X, CLASSES, sample_weight=WEIGHTS, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, rel=1e-5)


class OwnFigures(keras.Model):
    """Returns numbers of a batch, by names of its metrics or others, and what it reads of the optimizer."""

    def __init__(self, *others):
        super().__init__()
        self.dense, self.others = keras.layers.Dense(3), others

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.figures(loss)

    def test_step(self, data):
        x, y = data
        return self.figures(self.compute_loss(x, y, self(x)))

    def figures(self, loss):
        self.metrics[0].update_state(loss)
        others = {"rate": self.optimizer.learning_rate, "steps": self.optimizer.iterations, "twice": 2 * loss}
        return {"loss": loss, **{name: others[name] for name in self.others}}


@pytest.mark.parametrize("others", [(), ("twice",), ("rate", "steps")], ids=" ".join)
@pytest.mark.parametrize("rate", [0.1, ExponentialDecay(0.1, 1, 0.5)], ids=["variable", "schedule"])
def test_what_an_own_step_returns_is_reported_as_in_keras(others, rate):
    def trained(fit):
        keras.utils.set_random_seed(0)
        model, batches = OwnFigures(*others), Batches()
        model.compile(keras.optimizers.SGD(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        data = tf.data.Dataset.from_tensor_slices((X[:48], CLASSES[:48]))
        options = {"epochs": 2, "verbose": 0, "callbacks": [batches], "validation_data": data.take(40).batch(16)}
        return fit(model, data.batch(16), **options).history, batches.seen

    expected, seen = trained(lambda model, *args, **options: model.fit(*args, **options))
    found, ours = trained(lambda model, *args, **options: Trainer(model).fit(*args, **options))
    for mine, other in zip([found, *ours], [expected, *seen], strict=True):
        assert_same({name: mine[name] for name in other}, other)


class Notes(Observer):
    def __init__(self):
        self.steps, self.epochs = [], []

    def on_step(self, record):
        self.steps.append(record)

    def on_epoch(self, record):
        self.epochs.append(record)


def watched(path, **plan):
    """Train on 50 samples in batches of 16, write the metrics to `path`, and return what observers received."""
    trainer = Trainer(one_output(), keras.optimizers.SGD(0.0), "categorical_crossentropy", ["accuracy", F1()])
    place = {"shuffle": False, "steps_per_epoch": None}
    data = training_data((X, ONE_HOT), trainer.backend, batch=16, seed=0, **place)
    trainer.build(data)
    notes, writer = Notes(), JsonlWriter(path)
    validation = validation_batches((X[:20], ONE_HOT[:20]), trainer.backend, batch=16)
    try:
        trainer.train(data, Plan(8, **plan), validation=validation, observers=Observers([notes, writer]))
    finally:
        writer.close()
    return trainer, notes, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.extended
def test_steps_show_the_epoch_so_far_and_keep_what_is_new(tmp_path):
    """With a rate of zero every figure is that of the samples it covers."""
    trainer, notes, lines = watched(tmp_path / "metrics.jsonl", log_every=3)
    ends = {1: (0, 16), 3: (16, 48), 4: (48, 50), 6: (0, 32), 8: (32, 50)}
    assert [record.step for record in notes.steps] == list(ends)
    for record in notes.steps:
        begin, end = ends[record.step]
        so_far = trainer.evaluate(X[:end], ONE_HOT[:end], verbose=0, return_dict=True)
        recent = trainer.evaluate(X[begin:end], ONE_HOT[begin:end], verbose=0, return_dict=True)
        assert_same(dict(sorted(record.so_far.items())), so_far)
        assert_same(dict(sorted({"loss": record.loss, **record.metrics}.items())), recent)
    whole, held_out = (trainer.evaluate(X[:end], ONE_HOT[:end], verbose=0, return_dict=True) for end in (50, 20))
    expected = {**whole, **{f"val_{name}": value for name, value in held_out.items()}}
    assert_same(dict(sorted(notes.epochs[1].figures.items())), expected)
    assert [line["kind"] for line in lines] == ["step"] * 3 + ["evaluation", "epoch"] + ["step"] * 2 + [
        "evaluation",
        "epoch",
    ]
    assert lines[-1]["f1_score"] == pytest.approx(whole["f1_score"].tolist())
    assert lines[0].keys() >= {"loss", "accuracy", "f1_score"}
    assert "so_far" not in lines[0]


class StopAt(keras.callbacks.Callback):
    def __init__(self, batch):
        super().__init__()
        self._batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self._batch:
            self.model.stop_training = True


def test_an_epoch_that_a_callback_cuts_short_has_figures():
    model = one_output()
    model.compile(keras.optimizers.SGD(0.1), "categorical_crossentropy", metrics=["accuracy"])
    options = {"batch_size": 16, "epochs": 9, "shuffle": False, "verbose": 0, "validation_data": (X[:9], ONE_HOT[:9])}
    expected = model.fit(X, ONE_HOT, callbacks=[StopAt(1)], **options)
    trainer = Trainer(one_output(), keras.optimizers.SGD(0.1), "categorical_crossentropy", ["accuracy"])
    found = trainer.fit(X, ONE_HOT, callbacks=[StopAt(1)], **options)
    assert (found.steps, found.epoch) == (2, [0])
    assert_same(found.history, expected.history)
    assert found.train_loss == found.history["loss"][0]


def test_keras_callbacks_find_the_figures_that_they_name(tmp_path):
    build, objective, targets, _ = CASES["several losses"]
    trainer = Trainer(build(), keras.optimizers.SGD(0.1), **_fresh(objective))
    params = []
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch:02d}-{val_loss:.2f}.keras")),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.ReduceLROnPlateau(monitor="val_cls_loss", mode="min", patience=0, min_delta=10.0, factor=0.5),
        keras.callbacks.EarlyStopping(monitor="val_cls_accuracy", patience=1, min_delta=10.0, mode="max"),
        keras.callbacks.LambdaCallback(on_train_begin=lambda logs: params.append(dict(callbacks[0].params))),
    ]
    result = trainer.fit(
        X, targets, batch_size=16, epochs=9, verbose=2, callbacks=callbacks, validation_data=(X[:9], _first(targets, 9))
    )
    assert result.epoch == [0, 1]
    assert result.history["learning_rate"] == pytest.approx([0.1, 0.1])
    assert float(trainer.optimizer.learning_rate) == pytest.approx(0.05)
    saved = sorted(path.name for path in tmp_path.glob("*.keras"))
    assert saved == [f"{epoch:02d}-{loss:.2f}.keras" for epoch, loss in enumerate(result.history["val_loss"], 1)]
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert float(rows[1]["val_cls_loss"]) == pytest.approx(result.history["val_cls_loss"][1])
    assert params == [{"verbose": 2, "epochs": 9, "steps": 4}]


@pytest.mark.extended
def test_a_history_with_arrays_goes_on_from_a_checkpoint(tmp_path):
    options = {"epochs": 2, "verbose": 0, "callbacks": [keras.callbacks.Callback()], "checkpoint": tmp_path}

    def fitted(**changes):
        trainer = Trainer(one_output(), keras.optimizers.SGD(0.1), "categorical_crossentropy", [F1()])
        if changes.pop("resume", False):
            trainer.resume(tmp_path)
        return trainer.fit(X, ONE_HOT, **{**options, **changes}).history["f1_score"]

    first = fitted()
    np.testing.assert_allclose(fitted(epochs=3, resume=True)[:2], first)


def test_the_best_epoch_is_chosen_by_a_single_number(tmp_path):
    trainer = Trainer(one_output(), "sgd", "categorical_crossentropy", [F1()])
    with pytest.raises(ConfigError, match=r"Received: 'f1_score' of 3 values\. .* such as F1Score\(average='macro'\)"):
        trainer.fit(X, ONE_HOT, verbose=0, checkpoint=Checkpoint(tmp_path, best="f1_score", mode="max"))
