"""Ranks of an elastic job that fall silent: what horovodrun makes of them."""

import os
import threading
from types import SimpleNamespace

import pytest

from hvdtrain.runtime.control.store import Store
from hvdtrain.runtime.elastic import SCOPE, Heartbeat, Worlds, encode_beat
from hvdtrain.runtime.tuning import GLOO_PATIENCE, PATIENCE_IF_ELASTIC, lose_silent_ranks

silent_ranks = pytest.importorskip("horovod.runner.elastic.silent_ranks", reason="Horovod is not installed")
from horovod.runner.elastic import discovery  # noqa: E402
from horovod.runner.elastic.driver import ElasticDriver  # noqa: E402
from horovod.runner.elastic.rendezvous import create_rendezvous_handler  # noqa: E402
from horovod.runner.http import http_server  # noqa: E402

BEAT = encode_beat(60.0, 120.0)
A, B = ("host-a", 0), ("host-b", 1)


class Job:
    """Two ranks, a clock that is set by hand, and what the user is told."""

    def __init__(self):
        self.time, self.said = 1000.0, []
        self.silent = silent_ranks.SilentRanks(lambda: self.time, self.said.append)

    def passes(self, seconds, *heard):
        for _ in range(int(seconds)):
            self.time += 1.0
            for slot in heard:
                self.silent.hear(slot, BEAT)
            self.silent.look()


@pytest.fixture
def job():
    return Job()


def test_a_silent_rank_is_given_up_once_others_wait_for_it(job):
    with job.silent.process(A), job.silent.process(B) as lost:
        job.passes(5, A, B)
        job.passes(500, A)
        assert not lost.is_set(), "nobody waits for it"
        with job.silent.asking(A):
            job.passes(1)
            assert lost.is_set()
            job.passes(500)
    assert job.said == [
        "horovodrun: the rank host-b[1] has given no sign of life for 501 s, and others wait for it: the job goes on "
        "without it. It is stopped, or its host is gone."
    ]


def test_a_rank_that_has_just_been_started_has_longer_for_its_first_sign(job):
    with job.silent.process(A):
        job.passes(300, A)
        with job.silent.process(B) as lost, job.silent.asking(A):
            job.passes(119)
            assert not lost.is_set()
            job.passes(1)
            assert lost.is_set()


def test_another_process_on_the_same_slot_is_not_taken_for_the_one_before(job):
    with job.silent.process(B):
        job.passes(1, B)
    with job.silent.process(A), job.silent.process(B) as lost, job.silent.asking(A):
        job.passes(100)
        assert not lost.is_set()


def test_a_launcher_that_stood_still_itself_blames_nobody(job):
    with job.silent.process(A), job.silent.process(B) as lost, job.silent.asking(A):
        job.passes(5, B)
        job.time += 3600
        job.passes(10)
        assert not lost.is_set()


@pytest.fixture
def driver(monkeypatch):
    """Horovod's driver of a job on two hosts, with no store."""
    hosts = discovery.FixedHosts({"host-a": 1, "host-b": 2})
    driver = ElasticDriver(SimpleNamespace(init=lambda plan: None, stop=lambda: None), hosts, 3, 3, timeout=30)
    yield driver
    driver.stop()


@pytest.mark.parametrize(("code", "recorded"), [(0, 137), (143, 143)])
def test_a_rank_that_is_given_up_never_counts_as_done(driver, monkeypatch, code, recorded):
    results, others, asking, done = {}, threading.Semaphore(0), threading.Event(), threading.Event()

    def handle_exit(slot, exit_code, timestamp):
        results[slot.hostname, slot.local_rank] = exit_code, timestamp
        (done.set if slot.hostname == "host-a" else others.release)()

    def runs(slot, events):
        place = slot.hostname, slot.local_rank
        driver.silent_ranks.hear(place, encode_beat(0.0, 0.0))
        if place == A:
            with driver.silent_ranks.asking(A):
                asking.set()
                assert others.acquire(timeout=30)
                assert others.acquire(timeout=30)
        else:
            assert asking.wait(30)
            assert events[-1].wait(30)
        return (0 if place == A else code), 12.5

    monkeypatch.setattr(driver, "_handle_worker_exit", handle_exit)
    driver.start(3, runs)
    assert done.wait(60)
    assert results == {A: (0, 12.5), ("host-b", 0): (recorded, 12.5), B: (recorded, 12.5)}


def test_a_rank_that_asks_for_its_next_place_is_waited_for_by_the_store(driver, monkeypatch):
    seen = []
    silent = driver.silent_ranks
    monkeypatch.setattr(driver._worker_registry, "record_ready", lambda *place: seen.append(list(silent._asking)))
    driver.record_ready(*A)
    assert (seen, driver.silent_ranks._asking) == ([[A]], [])


def test_the_store_takes_signs_of_life_and_keeps_the_rest():
    heard = []
    driver = SimpleNamespace(silent_ranks=SimpleNamespace(hear=lambda *sign: heard.append(sign)))
    server = http_server.RendezvousServer()
    port = server.start(create_rendezvous_handler(driver))
    store = Store("127.0.0.1", port)
    for scope, key in ((SCOPE, "host-b:1"), (SCOPE, "host-b"), ("board", "1")):
        store.put(scope, key, BEAT)
    assert heard == [(B, BEAT)]
    assert (store.get(SCOPE, "host-b:1"), store.get(SCOPE, "host-b"), store.get("board", "1")) == (None, None, BEAT)
    server.stop()


def test_a_rank_gives_signs_of_life_until_it_stops(monkeypatch):
    sent, enough = [], threading.Semaphore(0)

    def put(store, *message):
        sent.append(message)
        enough.release()

    monkeypatch.setattr("hvdtrain.runtime.elastic.Store.put", put)
    place = {"HOROVOD_HOSTNAME": "host-b", "HOROVOD_LOCAL_RANK": "1", GLOO_PATIENCE: "0.2"}
    store = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}
    heartbeat = Heartbeat({**place, **store}, 120.0)
    heartbeat.start()
    for _ in range(2):
        assert enough.acquire(timeout=30)
    heartbeat.stop()
    assert {message[:2] for message in sent} == {(SCOPE, "host-b:1")}
    assert sent[0][2] == encode_beat(0.2, 120.0)


@pytest.mark.parametrize(
    ("set_to", "hang_timeout", "patience"),
    [("60", 300.0, "60"), ("60", 20.5, "21"), ("60", 3.0, "10"), ("60", 0.0, "60"), ("45", 20.0, "45")],
)
def test_gloo_gives_a_rank_up_no_later_than_a_hang_would_end_the_job(set_to, hang_timeout, patience):
    assert PATIENCE_IF_ELASTIC == "60"
    environ = {GLOO_PATIENCE: set_to}
    lose_silent_ranks(environ, hang_timeout)
    assert environ == {GLOO_PATIENCE: patience}


def test_a_hang_of_silent_ranks_is_left_to_the_launcher_while_elastic_training_lasts():
    worlds = Worlds({**os.environ, GLOO_PATIENCE: "25"})
    assert worlds.patience == 0.0
    worlds.training = True
    assert worlds.patience == 25.0
