"""`elastic.run` begins again after a lost exchange, and hides nothing else."""

import subprocess
import sys

import horovod.tensorflow.elastic as plain
import pytest
import tensorflow as tf

import hvdtrain.horovod as hvd
import hvdtrain.horovod.elastic as face
from hvdtrain.horovod.flavour import keras
from hvdtrain.runtime.tuning import ALONE
from tests.launching import job_environment

CUT_OFF = """Detected at node my_own_name defined at (most recent call last):
  File "<string>", line 111, in horovod_allgather

[gloo/transport/tcp/pair.cc:589] Read error: Connection reset by peer"""


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
    error = tf.errors.UnknownError(None, None, "a full disk of gloo")
    assert plain.run(first_fails_with(error))(State(), "") is None
    with pytest.raises(tf.errors.UnknownError, match="a full disk of gloo"):
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


@pytest.mark.extended  # starts Horovod twice
def test_horovod_starts_again_in_an_elastic_job_with_the_users_cycle_time_and_threshold():
    """In a process of its own: a Horovod without its patch crashes."""
    again = """if True:
        import os
        import horovod.tensorflow as hvd
        import tensorflow as tf
        import hvdtrain.horovod.elastic as face
        from hvdtrain.horovod import basics
        basics.is_elastic = lambda: True
        face.init()
        assert (os.environ["HOROVOD_CYCLE_TIME"], os.environ["HOROVOD_FUSION_THRESHOLD"]) == ("0.5", "1024")
        face._reset()
        print("sum", float(hvd.allreduce(tf.constant(3.0), op=hvd.Sum)))
    """
    both = {"HOROVOD_CYCLE_TIME": "0.5", "HOROVOD_FUSION_THRESHOLD": "1024"}
    environ = {**job_environment(), **ALONE, **both}
    job = subprocess.run([sys.executable, "-c", again], env=environ, capture_output=True, text=True, timeout=60)
    assert job.returncode == 0, job.stderr[-2000:]
    assert "sum 3.0" in job.stdout
