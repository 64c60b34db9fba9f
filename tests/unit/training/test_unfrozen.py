"""Layers that are frozen or unfrozen between two calls of `fit`, and the position in the data of the second one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.optim.precision import LossScaleOptimizer
from hvdtrain.state.callbacks import callback_states, restore_callbacks
from hvdtrain.training.inputs import training_data
from hvdtrain.training.trainer import Trainer
from tests.builders import cross_entropy, samples
from tests.extended import mostly_extended

pytestmark = pytest.mark.usefixtures("session")

X, Y = samples(48)
CROSSENTROPY = cross_entropy()
OPTIONS = {"batch": 16, "shuffle": False, "verbose": False}


def two_layers(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(3)])


def by_hand(model, optimizer, epochs):
    """Train what is trainable, with an optimizer that may know more than that."""
    for _ in range(epochs):
        for first in range(0, 48, 16):
            x, y = X[first : first + 16], Y[first : first + 16]
            with tf.GradientTape() as tape:
                loss = CROSSENTROPY(y, model(x, training=True))
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)


def weights(model):
    return [weight.numpy() for weight in model.weights]


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def scaled():
    return LossScaleOptimizer(keras.optimizers.SGD(0.1))


@pytest.mark.parametrize(
    ("optimizer", "frozen"),
    mostly_extended(
        [(momentum, (0, None, 0, None)), (momentum, (0, 1)), (scaled, (None, 0)), (scaled, (0, 1))],
        lambda optimizer, frozen: frozen in ((0, None, 0, None), (None, 0)),
        why="layers are frozen and unfrozen, with both kinds of optimizer",
    ),
)
def test_what_is_trained_follows_the_layers(frozen, optimizer):
    """The reference knows all variables from the beginning: slots that nobody moves stay zero."""
    ours, theirs = two_layers(), two_layers()
    reference = keras.optimizers.SGD(0.1, momentum=optimizer().momentum if hasattr(optimizer(), "momentum") else 0.0)
    reference.build(theirs.trainable_variables)
    trainer = None
    for which in frozen:
        for model in (ours, theirs):
            for place, layer in enumerate(model.layers):
                layer.trainable = place != which
        trainer = trainer or Trainer(ours, optimizer(), CROSSENTROPY)
        before = weights(ours)
        trainer.fit((X, Y), **OPTIONS, epochs=2)
        by_hand(theirs, reference, 2)
        assert_close(weights(ours), weights(theirs))
        moved = [bool((a != b).any()) for a, b in zip(weights(ours), before, strict=True)]
        assert moved == [place != which for place in (0, 0, 1, 1)]


def test_a_frozen_layer_leaves_the_compiled_step_although_no_variable_does():
    """BatchNorm without weights of its own: frozen, it normalizes by its moving statistics and leaves them alone."""
    norm = keras.layers.BatchNormalization(center=False, scale=False)
    model = keras.Sequential([keras.Input((5,)), norm, keras.layers.Dense(3)])
    trainer = Trainer(model, "sgd", CROSSENTROPY)
    trainer.fit((X, Y), **OPTIONS)
    norm.trainable = False
    before = norm.moving_mean.numpy()
    trainer.fit((X, Y), **OPTIONS)
    np.testing.assert_array_equal(norm.moving_mean, before)
    norm.trainable = True
    trainer.fit((X, Y), **OPTIONS)
    assert (norm.moving_mean.numpy() != before).any()


def test_known_slots_stay_and_new_averages_begin_with_the_weights():
    model = two_layers()
    model.layers[0].trainable = False
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01, use_ema=True))
    trainer = Trainer(model, optimizer, CROSSENTROPY)
    trainer.fit((X, Y), **OPTIONS, epochs=2)
    optimizer.dynamic_scale.assign(64.0)
    before = {path: tensor.value.numpy() for path, tensor in trainer.state.named_tensors().items()}
    model.layers[0].trainable = True
    trainer.build(training_data((X, Y), trainer.backend, batch=16, seed=0, shuffle=False, steps_per_epoch=None))
    after = {path: tensor.value.numpy() for path, tensor in trainer.state.named_tensors().items()}
    assert all((after[path] == value).all() for path, value in before.items())
    new = {path.removeprefix("optimizer/inner_optimizer/"): after[path] for path in after.keys() - before.keys()}
    roles = ("model_variables_moving_average", "momentums", "velocities")
    assert new.keys() == {f"{role}/layers/0/{name}" for role in roles for name in ("kernel", "bias")}
    np.testing.assert_array_equal(new[f"{roles[0]}/layers/0/kernel"], model.layers[0].kernel)
    assert not new["momentums/layers/0/kernel"].any()


def test_the_model_can_be_saved_and_loaded_after_that(tmp_path):
    model = two_layers()
    model.layers[0].trainable = False
    trainer = Trainer(model, keras.optimizers.Adam(0.01), CROSSENTROPY)
    trainer.fit((X, Y), **OPTIONS)
    model.layers[0].trainable = True
    trainer.fit((X, Y), **OPTIONS, callbacks=[keras.callbacks.ModelCheckpoint(tmp_path / "m.keras")])
    loaded = keras.models.load_model(tmp_path / "m.keras")
    for ours, theirs in zip(trainer.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    tf.train.Checkpoint(optimizer=trainer.optimizer).write(str(tmp_path / "tf"))


# -- the position in the data --


class StopsAt(keras.callbacks.Callback):
    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            self.model.stop_training = True


def test_a_fit_that_was_stopped_within_an_epoch_is_followed_by_a_whole_one():
    trainer = Trainer(two_layers(), "sgd", CROSSENTROPY)
    trainer.fit((X, Y), **OPTIONS, log_every=1, epochs=3, callbacks=[StopsAt(4)])
    assert (trainer.state.scalars.step, trainer.state.scalars.epoch, trainer.state.scalars.step_in_epoch) == (4, 1, 1)
    trainer.fit((X, Y), **OPTIONS)
    assert (trainer.state.scalars.step, trainer.state.scalars.epoch, trainer.state.scalars.step_in_epoch) == (7, 2, 0)


# -- callbacks --


def test_callbacks_remember_what_they_had_seen():
    def fresh():
        stop = keras.callbacks.EarlyStopping(patience=5)
        plateau = keras.callbacks.ReduceLROnPlateau(patience=7)
        other = keras.callbacks.EarlyStopping(monitor="val_accuracy")
        for callback in (stop, plateau, other):
            callback.set_model(two_layers())
            callback.on_train_begin()
        return stop, plateau, other

    seen = fresh()
    seen[0].best, seen[0].wait, seen[1].cooldown_counter, seen[2].wait = np.float32(0.5), 3, 2, 1
    fresh_ones = fresh()
    restore_callbacks(fresh_ones, callback_states(seen))
    stop, plateau, other = fresh_ones
    assert (stop.best, stop.wait, stop.patience, plateau.cooldown_counter, other.wait) == (0.5, 3, 5, 2, 1)
