"""`elastic.run` begins again after a lost exchange, and hides nothing else."""

import os

import horovod.tensorflow.elastic as plain
import pytest
import tensorflow as tf

import hvdtrain.horovod as hvd
import hvdtrain.horovod.elastic as face
from hvdtrain.horovod.flavour import keras

CUT_OFF = "{{node my_own_name}} [gloo/transport/tcp/pair.cc:589] Read error: Connection reset by peer"
RESET = face._reset


class State:
    """What `run` needs of a state."""

    def __init__(self):
        self.log = []

    def __getattr__(self, name):
        return lambda *_: self.log.append(name)


def first_fails_with(error):
    """A function that is cut off once."""

    def train(state, word):
        if "restore" not in state.log:
            raise error
        return f"trained {word}"

    return train


@pytest.fixture(autouse=True)
def no_reset(monkeypatch):
    for module in (plain, face):
        monkeypatch.setattr(module, "_reset", lambda: None)


def test_a_lost_exchange_of_any_name_begins_again_where_horovod_returns_none():
    error = tf.errors.UnknownError(None, None, CUT_OFF)
    state = State()
    assert plain.run(first_fails_with(error))(state, "well") is None
    assert "restore" not in state.log
    state = State()
    assert face.run(first_fails_with(error))(state, "well") == "trained well"
    assert state.log == ["sync", "restore", "on_reset", "sync"]


def test_other_errors_are_raised_where_horovod_returns_none():
    error = tf.errors.UnknownError(None, None, "a full disk")
    assert plain.run(first_fails_with(error))(State(), "") is None
    with pytest.raises(tf.errors.UnknownError, match="a full disk"):
        face.run(first_fails_with(error))(State(), "")


def test_gradients_that_wait_for_further_passes_are_forgotten():
    """A rank that has come has none, and all must exchange in the same call."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=3)
    state = face.TensorFlowKerasState(model, optimizer)
    weight = model.trainable_variables[0]
    for _ in range(2):
        optimizer.apply_gradients([(tf.ones([1, 1]), weight)])
    assert int(optimizer.distribution._count) == 2
    state.restore()
    assert int(optimizer.distribution._count) == 0
    assert int(optimizer.iterations) == 0


def test_a_reset_leaves_out_what_horovod_cannot_read_twice(monkeypatch):
    seen = []
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "0.5")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1024")
    monkeypatch.setattr(face, "shutdown", lambda: seen.append("shutdown"))
    monkeypatch.setattr(face, "init", lambda: seen.append(sorted({*face._READ_ONCE} & os.environ.keys())))
    RESET()
    assert seen == ["shutdown", []]
