"""`steps_per_execution`: what is computed is what single steps compute, and callbacks come less often."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.checkpoint import Checkpoint
from hvdtrain.config.errors import NonFiniteError
from hvdtrain.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("session")
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((44, 4)).astype("float32"), RNG.integers(0, 3, 44)
"""Of 4 samples each, eleven batches: eight and three of a call of eight."""


class Own(keras.Model):
    """Takes its step by itself, and draws in it."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            noise = keras.random.normal(tf.shape(x), seed=self.seeds)
            loss = self.compute_loss(x, y, self(x + 0.1 * noise, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracked.update_state(loss)
        return {"loss": self.tracked.result(), "noise": tf.reduce_mean(noise)}

    @property
    def metrics(self):
        return [self.tracked]


def model_of(kind=keras.Model):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    x = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(keras.layers.Dense(5, "relu")(inputs)))
    model = kind(inputs, keras.layers.Dense(3, "softmax")(x))
    if kind is Own:
        model.seeds, model.tracked = keras.random.SeedGenerator(1), keras.metrics.Mean("loss")
    return model


def adam():
    return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9))


def trained(at_once, data=(X, Y), kind=keras.Model, callbacks=(), epochs=2, fit=None, **options):
    """Return a trainer that has trained, and its result."""
    model = model_of(kind)
    model.compile(adam(), "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=at_once)
    trainer = Trainer(model, **options)
    given = {"batch": 4, "epochs": epochs, "verbose": 0, **(fit or {})}
    if isinstance(data, tf.data.Dataset):
        del given["batch"]
    return trainer, trainer.fit(data, callbacks=list(callbacks), **given)


def assert_same(ours, theirs):
    for one, other in zip(ours[0].model.get_weights(), theirs[0].model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert ours[1].history == theirs[1].history
    assert ours[1].steps == theirs[1].steps
    assert ours[0].evaluate((X, Y), batch=4, verbose=0) == theirs[0].evaluate((X, Y), batch=4, verbose=0)


EVERYDAY = [
    {"clip_norm": 0.1, "on_bad_step": "skip", "spike_threshold": 4.0},
    {"kind": Own},
]
EXTENDED = [
    {},
    {"data": tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: y < 2).batch(4)},
    {"accumulate": 2},
    {"precision": "mixed_float16"},
    {"jit": True},
    {"data": tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(44, 1, reshuffle_each_iteration=False).batch(4)},
    {"fit": {"batch": 5, "steps_per_epoch": 3}, "epochs": 12},
    {"fit": {"log_every": 3, "validation_data": (X, Y), "validation_batch": 7}},
]


@pytest.mark.parametrize("options", EVERYDAY, ids=lambda options: "-".join(options))
def test_several_steps_in_a_call_are_those_of_as_many_calls(options):
    """To the last bit, with more steps than are always measured."""
    options = {"epochs": 3, **options}
    theirs = trained(1, **options)
    for at_once in (3, 100):
        assert_same(trained(at_once, **options), theirs)


@pytest.mark.extended
@pytest.mark.parametrize("options", EXTENDED, ids=lambda options: "-".join(options) or "plain")
def test_so_are_they_with_other_options(options):
    test_several_steps_in_a_call_are_those_of_as_many_calls(options)


class Noting(keras.callbacks.Callback):
    """Notes the numbers of all batches, and the weights after each."""

    def __init__(self):
        super().__init__()
        self.seen, self.losses = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)
        self.losses.append(logs["loss"])

    on_test_batch_begin = on_predict_batch_begin = on_train_batch_begin

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append(batch)

    def on_predict_batch_end(self, batch, logs=None):
        self.seen += [batch, len(logs["outputs"])]


def test_callbacks_are_called_as_by_keras():
    """With the same numbers, and the loss of the epoch so far; in evaluation and prediction, too."""
    ours, theirs, each = Noting(), Noting(), Noting()
    trainer, _ = trained(4, callbacks=[ours], fit={"shuffle": False})
    trained(1, callbacks=[each], fit={"shuffle": False})
    reference = model_of()
    reference.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=4)
    reference.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[theirs])
    assert ours.seen == theirs.seen == [0, 3, 4, 7, 8, 11] * 2
    assert ours.losses == [each.losses[number] for number in (3, 7, 10, 14, 18, 21)]
    for call, data in (("evaluate", (X, Y)), ("predict", (X,))):
        ours.seen, theirs.seen = [], []
        getattr(trainer, call)(data if call == "evaluate" else X, batch=4, verbose=0, callbacks=[ours])
        getattr(reference, call)(*data, batch_size=4, verbose=0, callbacks=[theirs])
        assert ours.seen == theirs.seen


def test_early_stopping_and_checkpoints_of_batches_come_after_calls(tmp_path):
    saves = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}-{batch}.keras"), save_freq=5)
    trained(4, callbacks=[saves], epochs=1)
    reference = model_of()
    reference.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=4)
    (tmp_path / "keras").mkdir()
    theirs = keras.callbacks.ModelCheckpoint(str(tmp_path / "keras" / "{epoch}-{batch}.keras"), save_freq=5)
    reference.fit(X, Y, batch_size=4, verbose=0, callbacks=[theirs])
    assert {each.name for each in tmp_path.glob("*.keras")} == {each.name for each in tmp_path.glob("keras/*")}


@pytest.mark.parametrize(("before", "after", "saved"), [(3, 4, 9), (4, 3, 8), (8, 1, 8)])
def test_a_run_goes_on_from_a_checkpoint_within_an_epoch(tmp_path, before, after, saved):
    """Saved after the call that has step 7, and resumed with another number of steps in a call."""
    fit = {"checkpoint": Checkpoint(tmp_path, every=7, keep=9)}
    whole = trained(before, epochs=3, fit=fit)
    found = {int(path.name.split("-")[1]): path for path in tmp_path.glob("step-*")}
    assert min(found) == saved
    for step in found.keys() - {saved}:
        shutil.rmtree(found[step])
    model = model_of()
    model.compile(adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    trainer = Trainer(model, steps_per_execution=after)
    assert trainer.resume(tmp_path) == found[saved]
    result = trainer.fit((X, Y), batch=4, epochs=3, verbose=0)
    for one, other in zip(model.get_weights(), whole[0].model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert result.history == whole[1].history


def test_the_first_bad_step_of_a_call_is_named():
    spoilt = X.copy()
    spoilt[21] = np.nan
    with pytest.raises(NonFiniteError, match=r"NaN or infinite values at step 6 \(epoch 1\)"):
        trained(4, data=(spoilt, Y), fit={"shuffle": False})


def test_bad_steps_of_a_call_are_skipped_one_by_one():
    spoilt = X.copy()
    spoilt[[21, 25]] = np.nan
    options = {"data": (spoilt, Y), "fit": {"shuffle": False}, "on_bad_step": "skip"}
    ours, theirs = trained(8, **options), trained(1, **options)
    assert_same(ours, theirs)
    assert ours[1].bad_steps == theirs[1].bad_steps == {"non_finite": 4, "spikes": 0, "rollbacks": []}


def test_there_is_one_graph_of_the_step_and_a_loop_around_it():
    trainer, _ = trained(8, epochs=5)
    (step,) = trainer.factory._known.values()
    kinds = [kind for kind in step._special._graphs if kind[0] == "loop"]
    assert len(kinds) == 1
    alone = [graph for kind, graph in step._special._graphs.items() if kind[0] is False]
    assert len(alone) == 1
