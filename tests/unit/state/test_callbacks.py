"""What callbacks remember over a checkpoint: Keras' own, and users' own that keep other things under the same names."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.state.callbacks import callback_states, restore_callbacks


def restored(callback, into):
    """Let `into` remember what `callback` does, by way of JSON as in a checkpoint, and return it."""
    restore_callbacks([into], json.loads(json.dumps(callback_states([callback]))))
    return into


class Own(keras.callbacks.Callback):
    """A user's own callback with attributes that have names of Keras' callbacks."""

    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)


@pytest.mark.parametrize("name", ["best", "wait", "stopped_epoch"])
@pytest.mark.parametrize(
    "value",
    [{"loss": 1.0}, [{}], {1, 2}, np.zeros(3), tf.ones([2]), print, 1j, object()],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_number_is_left_alone(name, value):
    mine = object()
    again = restored(Own(**{name: value, "cooldown_counter": 2}), Own(**{name: mine}))
    assert getattr(again, name) is mine
    assert again.cooldown_counter == 2


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.array(0.5), 0.5),
        (tf.constant(0.5), 0.5),
        (np.float64("inf"), float("inf")),
        (np.bool_(True), True),
        (None, None),
        ("max", "max"),
    ],
)
def test_numbers_come_back_as_pythons(value, plain):
    again = restored(Own(best=value), Own(best=7))
    assert again.best == plain
    assert type(again.best) is type(plain)


def test_a_history_is_that_of_keras_only():
    again = restored(Own(history={"loss": []}), Own(history="mine"))
    assert again.history == "mine"
    history, later = keras.callbacks.History(), keras.callbacks.History()
    for each in (history, later):
        each.set_model(keras.Sequential())
        each.on_train_begin()
    history.on_epoch_end(0, {"loss": np.float32(0.5), "of_classes": np.ones(2), "odd": object()})
    assert restored(history, later).history == {"loss": [0.5], "of_classes": [[1.0, 1.0]]}
    assert later.epoch == [0]


def test_a_property_is_not_set():
    class Computed(Own):
        @property
        def best(self):
            return 1.0

    assert restored(Computed(), Computed()).best == 1.0


def test_a_callback_with_a_state_of_its_own_decides_itself():
    class Deciding(Own):
        def get_state(self):
            return {"seen": self.seen}

        def set_state(self, state):
            self.seen = state["seen"]

    assert restored(Deciding(seen=[1, 2], best={}), Deciding()).seen == [1, 2]


def stopping(**options):
    """Return an EarlyStopping that has begun."""
    stop = keras.callbacks.EarlyStopping("loss", patience=5, **options)
    stop.set_model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    stop.on_train_begin()
    return stop


def test_best_weights_that_no_checkpoint_holds_are_not_replaced_by_others():
    stop = stopping(restore_best_weights=True)
    assert restored(stop, stopping(restore_best_weights=True)).best is None, "there was no epoch that could be best"
    stop.model.compile(loss="mse")
    stop.monitor_op = np.less
    stop.on_epoch_end(0, {"loss": 0.25})
    for saved in (stop, stopping()):
        saved.best, saved.wait = 0.25, 1
        with pytest.raises(
            ConfigError,
            match=r"EarlyStopping with restore_best_weights=True cannot resume .* Received: a best value of 0.25. Pass "
            r"EarlyStopping\(restore_best_weights=False\), and keep the best weights in a file, with ModelCheckpoint",
        ):
            restored(saved, stopping(restore_best_weights=True))
        again = restored(saved, stopping())
        assert (again.best, again.wait) == (0.25, 1)
