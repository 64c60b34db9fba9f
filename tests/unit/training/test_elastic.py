"""Elastic training: options, commits, and what ends a world."""

import _thread
import json
import os
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.errors import ConfigError, LaunchError, MissingRankError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.config.training import UpdateConfig
from hvdtrain.data.batch import per_replica
from hvdtrain.runtime.broken_links import sockets
from hvdtrain.runtime.elastic import Engine, HostsChangedError, Worlds, is_over, threads
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.objects import wait_for_all
from hvdtrain.runtime.survivors import Survivors
from hvdtrain.state.named_tensors import NamedTensor, replicated_tensor
from hvdtrain.state.scalars import Scalars
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.elastic import MOST_IN_VAIN, Commit, Commits, WorldRecord, check_goes_on
from hvdtrain.training.step.batches import per_microbatch
from tests.unit.gathering import Gathering, on_ranks
from tests.unit.threaded_ranks import as_ranks

GLOO = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}


class HorovodInternalError(Exception):
    """Named as Horovod's own."""


@pytest.mark.parametrize(("value", "elastic"), [(None, False), ("0", False), ("1", True)])
def test_horovodrun_with_host_discovery_is_an_elastic_launcher(value, elastic):
    environ = GLOO if value is None else {**GLOO, "HOROVOD_ELASTIC": value}
    assert detect_environment(environ).elastic is elastic


def session_of(launcher, *, worlds=None):
    link = SimpleNamespace(worlds=worlds)
    return SimpleNamespace(elastic=worlds is not None, environment=SimpleNamespace(launcher=launcher), link=link)


@pytest.mark.parametrize(
    ("launcher", "received"),
    [("none", "no launcher"), ("mpirun", "mpirun with a fixed"), ("horovodrun", "horovodrun with a fixed")],
)
def test_a_fixed_number_of_ranks_is_refused(launcher, received):
    with pytest.raises(ConfigError, match=rf"elastic needs a launcher .* Received: {received}.*Elsewhere restart"):
        check_goes_on(session_of(launcher), UpdateConfig())
    with pytest.raises(ConfigError, match=rf"update='gossip' needs .* mpirun --enable-recovery.*{received}"):
        check_goes_on(session_of(launcher), UpdateConfig(update="gossip"))


def test_over_mpi_ranks_must_train_apart(monkeypatch):
    session = session_of("mpirun", worlds=Survivors({}))
    with pytest.raises(ConfigError, match=r"elastic over MPI needs ranks that train apart: update='async'"):
        check_goes_on(session, UpdateConfig())
    check_goes_on(session, UpdateConfig(update="easgd", local_steps=2))
    monkeypatch.setenv("HOROVOD_TIMELINE", "trace.json")
    with pytest.raises(ConfigError, match="trace of Horovod does not go with elastic over MPI"):
        check_goes_on(session, UpdateConfig(update="easgd"))


def test_local_steps_are_refused():
    with pytest.raises(ConfigError, match=r"local_steps=2 does not go with elastic: between two averages"):
        check_goes_on(session_of("horovodrun", worlds=Worlds({})), UpdateConfig(local_steps=2))


def test_batches_need_not_divide():
    assert per_replica(25, 2, uneven=True) == 12
    with pytest.raises(ConfigError, match="at least one sample"):
        per_replica(0, 2, uneven=True)
    assert per_microbatch(25, 2, 2, uneven=True) == 7
    assert per_microbatch(24, 2, 3, uneven=True) == per_microbatch(24, 2, 3) == 4


@pytest.mark.parametrize(
    ("error", "reports", "over"),
    [
        (HostsChangedError("hosts"), {}, True),
        (HorovodInternalError("lost"), {}, True),
        (HorovodInternalError("lost"), {1: "ValueError"}, False),
        (ValueError("a mistake"), {}, False),
        (LaunchError("no message"), {}, False),
    ],
)
def test_a_mistake_ends_more_than_a_world(error, reports, over):
    assert is_over(error, SimpleNamespace(failures=lambda: reports)) is over


class ForeignThread:
    """A thread that Python does not know of, as those of C++, until it is told to end."""

    def __init__(self):
        self._lock = _thread.allocate_lock()
        self._lock.acquire()
        before = threads()
        _thread.start_new_thread(self._lock.acquire, ())
        self._number = (threads() - before).pop()

    def end(self):
        self._lock.release()
        while self._number in threads():
            time.sleep(0.001)


def test_an_engine_that_has_stopped_cuts_its_connections():
    """Horovod leaves them open, and ranks that wait for this one would wait on."""
    before = threads(), set(sockets())
    here, there = (each.detach() for each in socket.socketpair())  # Python has no objects of C++'s
    thread = ForeignThread()
    engine = Engine(*before)
    with socket.create_server(("127.0.0.1", 0)) as other:
        engine.look(0.0)
        engine.check()
        os.write(here, b"1")
        assert os.read(there, 9) == b"1"
        thread.end()
        with pytest.raises(Exception, match="Horovod has stopped: a rank is gone"):
            engine.check()
        engine.look(1.0)
        assert os.read(there, 9) == b"", "the end"
        with socket.create_connection(other.getsockname(), timeout=30):
            pass  # what was opened later is none of Horovod's
    os.close(here)
    os.close(there)


def test_an_engine_leaves_alone_what_the_script_does_while_it_starts():
    before = threads(), set(sockets())
    of_engine, running = ForeignThread(), threading.Event()
    script = threading.Thread(target=running.wait)
    script.start()
    here, there = socket.socketpair()
    engine = Engine(*before)
    running.set()
    script.join()
    while str(script.native_id) in threads():  # the system knows it a little longer than Python
        time.sleep(0.001)
    engine.check()
    of_engine.end()
    assert engine.stopped
    engine.cut()
    with here, there:
        there.settimeout(30)
        here.send(b"1")
        assert there.recv(1) == b"1"


def test_hosts_that_change_are_noted_until_the_next_world(monkeypatch):
    worlds = Worlds({})
    assert not worlds.hosts_changed
    thread = threading.Thread(target=worlds.on_hosts_updated, args=(1, None))
    thread.start()
    thread.join()
    assert worlds.hosts_changed
    worlds.entered = 1
    monkeypatch.setattr("hvdtrain.runtime.elastic.take_next_place", lambda *place: None)
    monkeypatch.setattr(worlds, "listen", lambda: None)
    worlds.enter(1.0)
    assert not worlds.hosts_changed


@pytest.fixture
def state():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    return TrainState(model, keras.optimizers.Adam(), seed=1)


@pytest.fixture
def backend():
    return SingleBackend(SimpleNamespace(control=None, plan=None, environment=None))


def values_of(state):
    return {path: tensor.value.numpy() for path, tensor in state.named_tensors().items()}


def test_a_commit_is_the_whole_state(state, backend):
    commits = Commits()
    assert not commits.restore(state, backend)
    state.scalars = replace(state.scalars, step=5, epoch=1, step_in_epoch=2)
    state.scalars.progress.callbacks = [{"class": "History", "epoch": [0]}]
    state.held_weights = {"0/kernel": np.ones([2, 2], np.float32)}
    before = values_of(state)
    assert commits.begin(state, backend) is None
    for tensor in state.named_tensors().values():
        tensor.value.assign(tensor.value + tensor.value.dtype.as_numpy_dtype(1))
    state.scalars = replace(state.scalars, step=8)
    state.scalars.progress.callbacks[0]["epoch"].append(1)
    state.held_weights = {}
    assert commits.restore(state, backend)
    assert (state.scalars.step, state.scalars.step_in_epoch, state.scalars.epoch) == (5, 2, 1)
    assert state.scalars.progress.callbacks == [{"class": "History", "epoch": [0]}]
    assert int(state.counter.numpy()) == 5
    for path, value in values_of(state).items():
        np.testing.assert_array_equal(value, before[path])
    np.testing.assert_array_equal(state.held_weights["0/kernel"], np.ones([2, 2]))
    assert commits.begin(state, backend) == "elastic: 1 rank before, 1 now: goes on after step 5"
    assert commits.worlds == [WorldRecord(5, 1), WorldRecord(5, 1)]


class Broadcasting(Gathering):
    """Ranks on threads that broadcast through what they bring."""

    def broadcast(self, tensors, *, root=0, among="replicas"):
        mine = {path: variable.numpy().tolist() for path, variable in tensors.items()}
        told = json.loads(self.gather_bytes(json.dumps(mine).encode(), timeout=None)[root])
        for path, variable in tensors.items():
            variable.assign(told[path])


def test_a_commit_has_what_other_ranks_hold_alone():
    """In the next world another rank may hold it."""

    def held(backend, owner):
        mine = backend.index == owner
        value = tf.Variable([[1.0, 2.0]] if mine else [[0.0]])
        region = (slice(0, 1), slice(0, 2)) if mine else (slice(0, 0), slice(0, 0))
        number = tf.Variable(5.0 if mine else 0.0)
        one = (slice(0, 1),) if mine else (slice(0, 0),)
        return {
            "whole": replicated_tensor(tf.Variable([3.0])),
            "slot": NamedTensor(value, (1, 2), region, replicated=False),
            "count": NamedTensor(number, (1,), one, replicated=False),
        }

    def commit(backend):
        state = SimpleNamespace(scalars=Scalars(seed=1, step=4), held_weights={}, restore=lambda scalars: None)
        state.named_tensors = lambda: held(backend, owner=1)
        kept = Commit.of(state, backend)
        moved = held(backend, owner=0)
        for tensor in moved.values():
            tensor.value.assign(tf.zeros_like(tensor.value))
        state.named_tensors = lambda: moved
        kept.restore(state)
        return kept.step, *(tensor.value.numpy().tolist() for tensor in moved.values())

    here, there = on_ranks(2, commit, kind=Broadcasting)
    assert here == (4, [3.0], [[1.0, 2.0]], 5.0)
    assert there == (4, [3.0], [[0.0]], 0.0)


def test_a_world_tells_how_long_its_first_step_was_waited_for(state, backend, monkeypatch):
    seconds = iter([100.0, 101.0, 108.5, 109.25, 110.0])
    # Of this module alone: other threads look at the clock, too.
    monkeypatch.setattr("hvdtrain.training.elastic.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    commits = Commits()
    commits.begin(state, backend)
    for _ in range(2):
        commits.note_step()
    commits.begin(state, backend)
    for _ in range(3):
        commits.note_step()
    assert [world.seconds_to_first_step for world in commits.worlds] == [None, 8.25]


def test_worlds_that_come_to_nothing_end_the_job(state, backend):
    commits = Commits()
    commits.begin(state, backend)
    for _ in range(MOST_IN_VAIN - 1):
        assert commits.restore(state, backend)
        commits.begin(state, backend)
    with pytest.raises(LaunchError, match=f"{MOST_IN_VAIN} worlds in a row .* further than step 0"):
        commits.restore(state, backend)


def session_over(channel):
    return SimpleNamespace(control=channel, config=RuntimeConfig(load_timeout=10.0))


def test_a_rank_that_joins_is_told_what_was_settled():
    def join(channel):
        commits = Commits()
        commits.settled = {"batch": 25} if channel.rank == 1 else None
        return commits.agree("train", session_over(channel)), commits.goes_on

    assert as_ranks(3, join) == 3 * [({"batch": 25}, True)]
    assert as_ranks(2, lambda channel: Commits().agree("train", session_over(channel))) == [None, None]


def test_a_rank_that_joins_and_does_something_else_ends_the_job():
    def join(channel):
        if channel.rank == 1:
            return wait_for_all(session_over(channel), "before fit", None)
        return Commits().agree("fit(elastic=True)", session_over(channel))

    for error in as_ranks(2, join):
        assert isinstance(error, ConfigError)
        assert "Every rank makes the same calls" in str(error)
        assert "barrier()" in str(error)


def test_ranks_that_wait_for_a_lost_one_agree_that_it_is_missing():
    def meet(channel):
        return None if channel.rank == 1 else channel.exchange(b"", timeout=1.0)

    here, _, there = as_ranks(3, meet)
    assert isinstance(here, MissingRankError)
    assert isinstance(there, MissingRankError)
    assert is_over(there, SimpleNamespace(failures=dict))


def test_an_exchange_ends_once_horovod_tells_that_a_rank_is_lost():
    def meet(channel):
        if channel.rank == 1:
            return None

        def stopped():
            raise HorovodInternalError("a rank is gone")

        channel.while_waiting = stopped
        return channel.exchange(b"", timeout=60.0)

    here, _, there = as_ranks(3, meet)
    assert isinstance(here, HorovodInternalError)
    assert isinstance(there, HorovodInternalError)
