"""What callbacks see of single batches."""

from functools import partial

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.training.callbacks.keras_callbacks import needs_of_all
from hvdtrain.training.trainer import Trainer
from tests.builders import cross_entropy, samples

pytestmark = pytest.mark.usefixtures("session")

X, Y = samples(42, 4, 4)
LOSS = cross_entropy()


class Noting(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.train, self.test, self.begun = [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.train.append((batch, dict(logs)))

    def on_test_batch_begin(self, batch, logs=None):
        self.begun.append(batch)

    def on_test_batch_end(self, batch, logs=None):
        self.test.append((batch, dict(logs)))


class OwnStep(keras.Model):
    """A step of its own, which is Keras'."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, inputs):
        return self.dense(inputs)

    def test_step(self, data):
        return super().test_step(data)


def dense():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])


def noted(model, rate=0.0, **options):
    """Fit, and return what the callback noted; with a rate of zero every figure is that of the model as it is."""
    keras.utils.set_random_seed(0)
    trainer = Trainer(model(), keras.optimizers.SGD(rate), LOSS, ["accuracy"], **options)
    note = Noting()
    data = {"validation_data": (X, Y), "validation_batch": 16}
    result = trainer.fit((X, Y), batch=8, epochs=2, shuffle=False, verbose=False, callbacks=[note], **data)
    return trainer, note, result


def figures(trainer, samples):
    outcome = trainer.evaluate((X[:samples], Y[:samples]), return_dict=True)
    return outcome


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.extended), {"accumulate": 2}])
def test_batches_show_loss_and_metrics_of_the_epoch_so_far(options):
    trainer, note, _ = noted(dense, **options)
    assert [number for number, _ in note.train] == [*range(6)] * 2
    for number, logs in note.train:
        assert logs == pytest.approx(figures(trainer, min(8 * number + 8, 42)), rel=1e-5)


@pytest.mark.parametrize("model", [pytest.param(dense, marks=pytest.mark.extended), OwnStep])
def test_an_evaluations_batches_show_loss_and_metrics_so_far(model):
    trainer, note, result = noted(model)
    assert note.begun == [0, 1, 2] * 2
    assert [number for number, _ in note.test] == note.begun
    for number, logs in note.test:
        assert logs == pytest.approx(figures(trainer, min(16 * number + 16, 42)), rel=1e-5)
    last = result.evaluations[-1]
    assert note.test[-1][1] == pytest.approx({"loss": last.loss, **last.metrics})


class Second(keras.callbacks.Callback):
    """Evaluates other samples by the model's own metrics, and notes what these hold before."""

    def on_epoch_end(self, epoch, logs=None):
        logs["held"] = float(self.model.get_metrics_result()["loss"])
        logs["second"] = self.model.evaluate(-X[:8], Y[:8], verbose=0)[0]


@pytest.mark.parametrize("validated", [{}, {"validation_data": (X[:16], Y[:16])}], ids=["", "validated"])
def test_a_callback_that_evaluates_leaves_the_next_epochs_as_in_keras(validated):
    def history(fit):
        keras.utils.set_random_seed(0)
        model = dense()
        model.compile(keras.optimizers.SGD(0.05), LOSS, metrics=["accuracy"])
        return fit(model)(X, Y, epochs=3, shuffle=False, verbose=0, callbacks=[Second()], **validated).history

    expected = history(lambda model: partial(model.fit, batch_size=8))
    found = history(lambda model: partial(Trainer(model).fit, batch=8))
    assert sorted(found) == sorted(expected)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-5), name


def test_an_evaluation_within_an_epoch_leaves_the_epochs_metrics():
    trainer = Trainer(dense(), keras.optimizers.SGD(0.0), LOSS, ["accuracy"])
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: trainer.evaluate(X[:8], Y[:8]))
    found = trainer.fit(X, Y, batch=8, verbose=0, callbacks=[look]).history
    assert found["loss"] == pytest.approx([figures(trainer, 42)["loss"]], rel=1e-5)


class Others:
    """Stands for the other ranks, and what their callbacks ask for."""

    index = 0

    def __init__(self, *others):
        self._others = others

    def gather_bytes(self, payload, *, timeout, among="job"):
        return [payload, *self._others]


@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin", "on_epoch_end"])
def test_a_callback_that_compiles_is_refused(hook):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    callback = keras.callbacks.Callback()
    setattr(callback, hook, lambda *arguments: callback.model.compile("sgd", "mae"))
    trainer = hvdtrain.Trainer(model, "sgd", "mse")
    with pytest.raises(ConfigError, match="A callback compiled Sequential 'sequential"):
        trainer.fit(np.zeros((8, 3)), np.zeros((8, 1)), batch=4, callbacks=[callback], verbose=0)


def test_what_one_rank_asks_for_all_give():
    plain = keras.callbacks.Callback()

    def needed(callbacks, *others):
        needs = needs_of_all(callbacks, Others(*others))
        return {name for name, value in needs._asdict().items() if value}

    assert needed([]) == set()
    assert needed([plain]) == {"anything"}
    assert needed([[plain], Noting()]) == {"anything", "batches", "weights", "test_batches"}
    other = b'{"anything": true, "batches": false, "weights": false, "test_batches": true, "ends_on_nan": false}'
    assert needed([], other) == {"anything", "test_batches"}
    assert needed([keras.callbacks.ModelCheckpoint("x.keras", save_freq=3)]) == {"anything", "batches", "weights"}
    assert needed([keras.callbacks.ModelCheckpoint("x.keras")]) == {"anything"}
    assert needed([keras.callbacks.TerminateOnNaN()]) == {"anything", "batches", "ends_on_nan"}
    with pytest.raises(ConfigError, match=r"callbacks must be keras\.callbacks\.Callback objects"):
        needs_of_all([print], Others())
