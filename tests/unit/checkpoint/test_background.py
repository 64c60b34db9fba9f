"""Checkpoints that are written while training goes on."""

import os
import threading
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.checkpoint import background, pending
from hvdtrain.checkpoint.background import BackgroundSaver
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.checkpoint.naming import complete
from hvdtrain.checkpoint.restore import restore
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.state.named_tensors import NamedTensor
from hvdtrain.state.scalars import Scalars
from tests.unit.threaded_ranks import as_ranks


class State:
    """A training state of one variable, sharded over the ranks or held by all."""

    def __init__(self, rank=0, size=1):
        self.scalars = Scalars()
        self.variable = tf.Variable(tf.zeros([4]))
        box = (slice(4 * rank, 4 * rank + 4),)
        self.tensors = {"model/v": NamedTensor(self.variable, (4 * size,), box, size == 1)}

    def saved_tensors(self):
        return self.tensors

    def step(self, number):
        self.scalars.step = number
        self.variable.assign([float(number)] * 4)


class Gate:
    """Lets writers through when it is open."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        write = pending.write_tensors

        def gated(*arguments):
            assert self.open.wait(20)
            return write(*arguments)

        monkeypatch.setattr(pending, "write_tensors", gated)


def values(path, state):
    restore(path, state.tensors, NoOpCollectives())
    return set(state.variable.numpy())


def test_training_goes_on_while_a_checkpoint_is_written_as_it_was_copied(tmp_path, monkeypatch):
    gate, state = Gate(monkeypatch), State()
    saver = BackgroundSaver(Checkpointer(tmp_path), ControlChannel())
    state.step(1)
    saver(state)
    state.step(2)  # the writer has not begun to read
    assert complete(tmp_path) == []
    gate.open.set()
    saver.finish()
    (path,) = complete(tmp_path)
    assert path.name == "step-00000001"
    assert values(path, state) == {1.0}


def test_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    gate, state = Gate(monkeypatch), State()
    saver = BackgroundSaver(Checkpointer(tmp_path), ControlChannel())
    state.step(1)
    saver(state)
    threading.Timer(0.3, gate.open.set).start()
    begin = time.monotonic()
    state.step(2)
    saver(state)
    assert time.monotonic() - begin > 0.2
    assert complete(tmp_path)[0].name == "step-00000001"
    saver.finish()
    assert [values(path, state) for path in complete(tmp_path)] == [{1.0}, {2.0}]
    saver.finish()  # there is nothing to wait for


def test_what_fails_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch):
    state = State()
    saver = BackgroundSaver(Checkpointer(tmp_path), ControlChannel())

    def full(*arguments):
        raise OSError(28, "No space left on device")

    state.step(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        saver(state)
        with pytest.raises(CheckpointError, match=r"step-00000001 cannot be written: .*No space left on device"):
            saver.finish()
    assert list(tmp_path.iterdir()) == []
    state.step(2)
    saver(state)
    saver.finish()
    assert [path.name for path in complete(tmp_path)] == ["step-00000002"]


class Ranks:
    """The exchange of threads that stand for ranks, over their control channel."""

    def __init__(self, channel):
        self.channel = channel
        self.index = self.process = self.rank = channel.rank
        self.processes = self.job_size = channel.size
        self.primary = channel.rank == 0

    def gather_bytes(self, payload, *, timeout, among="job"):
        return self.channel.exchange(payload, timeout=20)


def test_ranks_agree_past_the_exchange_of_the_training(tmp_path, monkeypatch):
    """Each writes its slice; meanwhile they exchange other things, in an order of their own."""
    gate = Gate(monkeypatch)

    def body(channel):
        state, seen = State(channel.rank, channel.size), []
        saver = BackgroundSaver(Checkpointer(tmp_path, backend=Ranks(channel)), channel)
        for step in range(1, 4):
            state.step(step)
            saver(state)
            seen += [channel.exchange(f"{step}{n}".encode(), timeout=20) for n in range(20)]
            gate.open.set()
        saver.finish()
        assert all(len(set(answers)) == 1 for answers in seen)
        return channel.rank

    assert as_ranks(3, body) == [0, 1, 2]
    whole = State()
    whole.variable = tf.Variable(tf.zeros([12]))
    whole.tensors = {"model/v": NamedTensor(whole.variable, (12,), (slice(0, 12),), True)}
    assert [values(path, whole) for path in complete(tmp_path)] == [{1.0}, {2.0}, {3.0}]


def test_a_slice_that_cannot_be_written_fails_the_checkpoint_on_all_ranks(tmp_path, monkeypatch):
    write = pending.write_tensors

    def failing(file, owned):
        if file.name == "tensors-00001.safetensors":
            raise OSError(28, "No space left on device")
        return write(file, owned)

    monkeypatch.setattr(pending, "write_tensors", failing)

    def body(channel):
        saver = BackgroundSaver(Checkpointer(tmp_path, backend=Ranks(channel)), channel)
        saver(State(channel.rank, channel.size))
        with pytest.raises(CheckpointError, match="No space left on device"):
            saver.finish()
        return True

    assert as_ranks(2, body) == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_gone_keeps_nobody_waiting(tmp_path):
    def body(channel):
        saver = BackgroundSaver(Checkpointer(tmp_path, backend=Ranks(channel)), channel)
        if channel.rank:
            saver.files.copy(0, State(channel.rank, channel.size).tensors, {})  # takes part, and dies
            channel.report_failure("killed")
            return None
        saver(State(channel.rank, channel.size))
        begin = time.monotonic()
        saver.close()
        return time.monotonic() - begin

    assert as_ranks(2, body)[0] < 5
    assert complete(tmp_path) == []


def test_the_wait_for_other_ranks_is_bounded_by_the_clock(tmp_path, monkeypatch):
    """A store that takes a second to answer costs a second, whatever the pause between two questions."""

    class SlowBoard(ControlChannel):
        size, seconds, reads = 2, 0.0, 0

        def post(self, key, payload):
            pass

        def read(self, key):
            self.seconds += 1.0
            self.reads += 1
            return {}

        def failures(self):
            assert self.reads < 100, "waits for ever"
            return {}

    board = SlowBoard()
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: board.seconds))
    monkeypatch.setattr(background, "TIMEOUT_S", 10.0)
    copied = Checkpointer(tmp_path).copy(1, State().tensors, {})
    writing = background._Writing(copied, board)
    with pytest.raises(CheckpointError, match="other ranks have not written theirs"):
        writing.result()
    assert board.reads == 10


@pytest.mark.usefixtures("session")
def test_fit_trains_on_while_it_saves_and_ends_with_everything_saved(tmp_path, monkeypatch):
    gate, steps = Gate(monkeypatch), []
    x = np.ones((32, 3), "float32")
    trainer = hvdtrain.Trainer(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), "sgd", "mse")

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(len(complete(tmp_path)))
            if len(steps) == 7:
                gate.open.set()

    saves = hvdtrain.Checkpoint(tmp_path, every=4, keep=9)
    trainer.fit(x, x[:, :1], batch=4, epochs=2, checkpoint=saves, callbacks=[Look()], verbose=0)
    assert steps[:7] == [0] * 7, "the fourth step is saved, and three more are taken"
    assert [path.name[-2:] for path in complete(tmp_path)] == ["04", "08", "12", "16"]
