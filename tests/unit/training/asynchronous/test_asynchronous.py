"""Steps that workers take at their own pace; the workers of these tests are in this process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.parameter_server import ParameterServerBackend, _Result
from hvdtrain.backends.select import current_exchange
from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.errors import ConfigError, DataError, LaunchError, NonFiniteError
from hvdtrain.runtime.session import current
from hvdtrain.runtime.strategies import Roles
from hvdtrain.training.trainer import Trainer
from tests.builders import cross_entropy, dense, samples

pytestmark = pytest.mark.usefixtures("session")

SAMPLES, BATCH, EPOCHS = 50, 16, 3  # three full batches and one of 2 samples: 12 steps
RNG = np.random.default_rng(0)
X, Y = samples(SAMPLES)
CROSSENTROPY = cross_entropy()


class Result:
    def __init__(self, call):
        self.call = call
        self.value = None

    def fetch(self):
        if self.value is None:
            self.value = tf.nest.map_structure(lambda tensor: tensor.numpy(), self.call())
        return self.value


class Workers:
    """Run what is scheduled when somebody waits for it, the last first: `count` of them at a time."""

    def __init__(self, count):
        self.count = count
        self.waiting = []
        self.inputs = []

    def schedule(self, function, *args):
        self.inputs.append(np.asarray(tf.nest.flatten(args)[0]))
        self.waiting.append(Result(lambda: function(*args)))
        result = self.waiting[-1]
        if len(self.waiting) == self.count:
            self.join()
        return result

    def join(self):
        while self.waiting:
            self.waiting.pop().fetch()


class Served(SingleBackend):
    """A backend of so many workers."""

    name = "served"
    capabilities = ParameterServerBackend.capabilities

    def __init__(self, count):
        super().__init__(current())
        self.workers = Workers(count)
        self.roles = {"chief": 1, "worker": count, "parameter server": 1}


def rich_model():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, kernel_regularizer="l2", kernel_constraint="max_norm"),
            keras.layers.BatchNormalization(),
            keras.layers.ActivityRegularization(0.01),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )


def falling_adam():
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.9)
    return keras.optimizers.Adam(rate, use_ema=True, weight_decay=0.01)


def trained(backend, model=rich_model, optimizer=falling_adam, data=(X, Y), **options):
    trainer = Trainer(model, optimizer, CROSSENTROPY, ["accuracy"], backend=backend, clip_norm=1.0)
    options = {"batch": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": False, **options}
    return trainer, trainer.fit(data, **options)


def all_weights(trainer):
    return [*trainer.model.get_weights(), *(v.numpy() for v in trainer.optimizer.variables)]


@pytest.mark.extended  # trains twice, with all that a step can have
def test_one_worker_takes_the_steps_of_one_process():
    """With dropout, moving statistics, regularizers, bounds, averages of weights, a falling rate and sample weights."""
    data = X, Y, RNG.random(SAMPLES).astype("float32")
    served, result = trained(Served(1), data=data, log_every=5, validation_data=data)
    alone, expected = trained(SingleBackend(current()), data=data, log_every=5, validation_data=data)
    start = rich_model().get_weights()
    assert max(np.abs(a - b).max() for a, b in zip(served.model.get_weights(), start, strict=True)) > 1e-2
    for ours, theirs in zip(all_weights(served), all_weights(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    assert result.train_loss == pytest.approx(expected.train_loss, rel=1e-6)
    for ours, theirs in zip(result.evaluations, expected.evaluations, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-6)
    np.testing.assert_allclose(served.predict(X, batch=7), alone.predict(X, batch=7), rtol=1e-5, atol=1e-6)


def test_steps_that_pass_one_another_are_each_taken_once():
    backend = Served(3)
    trainer, result = trained(backend, dense, lambda: keras.optimizers.SGD(0.1), log_every=100)
    # Of four steps an epoch the first of all and each epoch's last are waited for; the others come in threes at most.
    assert [len(inputs) for inputs in backend.workers.inputs] == [16, 16, 16, 2] * EPOCHS
    for epoch in np.split(np.concatenate(backend.workers.inputs), EPOCHS):
        np.testing.assert_array_equal(epoch, X)
    assert int(trainer.optimizer.iterations) == trainer.state.scalars.step == result.steps == 12
    alone, _ = trained(SingleBackend(current()), dense, lambda: keras.optimizers.SGD(0.1), log_every=100)
    difference = max(np.abs(a - b).max() for a, b in zip(all_weights(trainer), all_weights(alone), strict=True))
    assert difference > 1e-6, "the steps were taken in order"


def test_callbacks_see_the_figures_of_all_steps():
    seen, batches, tested = [], [], []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(dict(logs)),
        on_train_batch_end=lambda batch, logs: batches.append(dict(logs)),
        on_test_batch_end=lambda batch, logs: tested.append(dict(logs)),
    )
    still = lambda: keras.optimizers.SGD(0.0)  # noqa: E731
    _, result = trained(Served(2), dense, still, validation_data=(X, Y), callbacks=[note])
    assert len(seen) == EPOCHS
    for logs in seen:
        assert logs["accuracy"] == pytest.approx(logs["val_accuracy"], rel=1e-6)
        assert logs["loss"] == pytest.approx(logs["val_loss"], rel=1e-6)
    assert batches[3]["accuracy"] == pytest.approx(seen[0]["accuracy"])
    assert tested[len(tested) // EPOCHS - 1]["loss"] == pytest.approx(seen[0]["val_loss"])
    assert result.history["loss"] == pytest.approx([logs["loss"] for logs in seen])


def test_a_nan_is_named_with_its_step():
    bad = X.copy()
    bad[20] = np.nan
    with pytest.raises(NonFiniteError, match=r"The data hold NaN or infinite values at step 2 \(epoch 1\)"):
        trained(Served(2), dense, data=(bad, Y))


def test_nothing_to_evaluate_is_said():
    trainer = Trainer(dense, "sgd", CROSSENTROPY, backend=Served(1))
    trainer.evaluate((X, Y))
    for call in (trainer.evaluate_on, trainer._predictor):
        with pytest.raises(DataError, match="There is nothing to"):
            call([])


def test_workers_exchange_nothing_in_a_loop_of_ones_own(monkeypatch):
    monkeypatch.setattr("hvdtrain.backends.select.backend_for", lambda session: Served(2))
    with pytest.raises(ConfigError, match="The workers of backend='served' exchange nothing with one another"):
        current_exchange()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "no route\nfrom /job:ps/replica:0/task:1/device:CPU:0 while\nfrom /job:worker/replica:0/task:0",
            r"server 1 \(rank 4\)",
        ),
        ("Failed copying to /job:worker/replica:0/task:1/device:CPU:0", r"worker 1 \(rank 2\)"),
        ("no route", "one of its processes"),
    ],
)
def test_who_is_gone_is_named(message, said):
    class Gone:
        def fetch(self):
            raise tf.errors.CancelledError(None, None, "given up")

        def join(self):
            raise tf.errors.UnavailableError(None, None, message)

    with pytest.raises(LaunchError, match=f"backend='parameter_server' lost .*{said}: its process has ended"):
        _Result(Gone(), Gone(), Roles(2, 2)).fetch()
