import threading
import time

import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control import rooted
from hvdtrain.runtime.control.channel import ControlChannel, name_ranks
from hvdtrain.runtime.control.rooted import RootedChannel
from hvdtrain.runtime.control.signing import Signer
from hvdtrain.runtime.control.store import Store, StoreTransport
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.link import open_control
from tests.unit.threaded_ranks import as_ranks, ask, on_threads, open_rank, rendezvous, start_server
from tests.waiting import wait_until


@pytest.fixture
def impatient(monkeypatch):
    """Wrongly signed messages are waited out for a short while only."""
    monkeypatch.setattr(rooted, "PATIENCE_S", 0.2)


def test_a_process_alone_needs_nobody():
    channel = open_control(detect_environment({}), timeout=1)
    assert type(channel) is ControlChannel
    assert channel.exchange(b"x", timeout=1) == [b"x"]
    channel.barrier(1)
    channel.report_failure("text")
    assert channel.failures() == {}
    channel.post("key", b"value")
    assert channel.read("key") == {0: b"value"}
    channel.close()


def test_every_rank_gets_every_payload_in_rank_order():
    def body(channel):
        rounds = [b"%d of %d\0\n" % (i, channel.rank) * 10**i for i in range(5)] + [b""]
        return [channel.exchange(payload, timeout=10) for payload in rounds]

    expected = [[b"%d of %d\0\n" % (i, rank) * 10**i for rank in range(3)] for i in range(5)] + [[b""] * 3]
    assert as_ranks(3, body) == [expected] * 3


def test_a_barrier_waits_for_the_last():
    left = []

    def body(channel):
        if channel.rank == 2:
            time.sleep(0.5)
            left.append("last comes")
        channel.barrier(10)
        left.append("leaves")

    as_ranks(3, body)
    assert left == ["last comes"] + ["leaves"] * 3


def test_a_timeout_names_the_missing_rank_on_all_others():
    def body(channel):
        if channel.rank == 2:
            return time.sleep(1.2)
        started = time.monotonic()
        with pytest.raises(LaunchError, match=r"No message from rank 2 of 3 within 0\.5 s") as raised:
            channel.exchange(b"", timeout=0.5)
        assert time.monotonic() - started < 5
        return str(raised.value)

    texts = as_ranks(3, body)
    assert texts[0] == texts[1]


def test_a_missing_rank_0_is_named():
    def body(channel):
        if channel.rank > 0:
            with pytest.raises(LaunchError, match="No message from rank 0 of 3"):
                channel.exchange(b"", timeout=0.3)

    assert as_ranks(3, body) == [None] * 3


def test_a_rank_that_never_starts_is_named():
    def body(rank):
        if rank != 1:
            with pytest.raises(LaunchError, match="No message from rank 1 of 3"):
                open_rank(rank, 3, port, timeout=0.5)

    port = rendezvous()
    assert on_threads(3, body) == [None] * 3


@pytest.mark.usefixtures("impatient")
def test_a_rank_with_another_secret_is_named_and_told():
    def body(rank):
        return open_rank(rank, 3, port, HVDTRAIN_JOB_SECRET="wrong" if rank == 1 else "right")

    port = rendezvous()
    errors = on_threads(3, body)
    assert all(isinstance(error, LaunchError) for error in errors)
    assert "from rank 1" in str(errors[0])
    assert str(errors[2]) == str(errors[0])
    assert "from rank 0" in str(errors[1])
    assert all("HVDTRAIN_JOB_SECRET" in str(error) for error in errors)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("forgery", ["tampered", "replayed", "from another rank"])
def test_a_forged_part_is_refused_and_its_sender_named(forgery):
    seen = {}

    def body(channel):
        scope = channel._transport._scope
        if channel.rank == 0:
            channel.exchange(b"first", timeout=10)
            with pytest.raises(LaunchError, match="Refused a message from rank 1 "):
                channel.exchange(b"second", timeout=10)
        if channel.rank == 1:
            message = channel._signer.sign(b"mine", purpose="part", sequence=0, sender=1)
            channel.exchange(b"mine", timeout=10)
            wrong = {"tampered": message[:-1] + b"x", "replayed": message}
            other = channel._signer.sign(b"mine", purpose="part", sequence=1, sender=2)
            ask(port, "PUT", f"/{scope}/part-1-1", wrong.get(forgery, other))
        seen[channel.rank] = True

    port = rendezvous()
    on_threads(2, lambda rank: body(open_rank(rank, 2, port)))
    assert seen == {0: True, 1: True}


@pytest.mark.usefixtures("impatient")
def test_a_forged_answer_is_refused():
    def body(rank):
        channel = open_rank(rank, 2, port)
        if rank == 1:
            ask(port, "PUT", f"/{channel._transport._scope}/answer-0", b"x" * 100)
            with pytest.raises(LaunchError, match="Refused a message from rank 0 "):
                channel.exchange(b"", timeout=10)

    port = rendezvous()
    assert on_threads(2, body) == [None, None]


def test_failures_reach_the_others_while_they_are_in_an_exchange():
    def body(channel):
        if channel.rank == 1:
            time.sleep(0.2)
            channel.report_failure("Zeile 1\nπ")
            return channel.failures()

        def wait_for_rank_1():
            with pytest.raises(LaunchError):
                channel.barrier(1.0)

        waiting = threading.Thread(target=wait_for_rank_1)
        waiting.start()
        deadline = time.monotonic() + 5
        while not channel.failures() and time.monotonic() < deadline:
            time.sleep(0.01)
        waiting.join()
        return channel.failures()

    assert as_ranks(3, body) == [{1: "Zeile 1\nπ"}, {}, {1: "Zeile 1\nπ"}]


def test_reports_of_several_ranks_at_once_all_arrive():
    def body(channel):
        channel.report_failure(f"of {channel.rank}")
        channel.barrier(10)
        return channel.failures()

    expected = [{rank: f"of {rank}" for rank in range(4) if rank != own} for own in range(4)]
    assert as_ranks(4, body) == expected


def test_a_forged_failure_is_ignored():
    def body(channel):
        scope = channel._transport._scope
        if channel.rank == 1:
            ask(port, "PUT", f"/{scope}/failure-1", b"x" * 40)
            ask(port, "PUT", f"/{scope}/failed", b"1")
        channel.barrier(10)
        return channel.failures()

    port = rendezvous()
    assert on_threads(2, lambda rank: body(open_rank(rank, 2, port))) == [{}, {}]


def test_a_channel_can_be_opened_again_in_the_same_job():
    def body(rank):
        for i in range(3):
            channel = open_rank(rank, 3, port)
            assert channel.exchange(b"%d" % i, timeout=10) == [b"%d" % i] * 3
            channel.close()
            channel.close()

    port = rendezvous()
    assert on_threads(3, body) == [None] * 3


def test_the_store_does_not_fill_up():
    held = []

    def body(channel):
        for _ in range(50):
            channel.exchange(b"x" * 1000, timeout=10)
        if channel.rank == 0:
            held.append([list(channel._transport.received(i, [1])) for i in range(49)])
            held.append([channel._transport.published(i) for i in range(48)])

    as_ranks(2, body)
    assert held == [[[]] * 49, [None] * 48]


def test_the_board_shows_each_ranks_latest_value_while_others_are_in_an_exchange():
    def body(channel):
        if channel.rank == 2:
            time.sleep(0.3)
            channel.post("step", b"1")
            channel.post("step", b"2\0\n")
            channel.post("other", b"x")
            return channel.barrier(10)
        waiting = threading.Thread(target=channel.barrier, args=(10,))
        waiting.start()
        channel.post("step", b"of %d" % channel.rank)
        deadline = time.monotonic() + 5
        while (found := channel.read("step")).keys() != {0, 1, 2} or found[2] == b"1":
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
        waiting.join()
        return found

    expected = {0: b"of 0", 1: b"of 1", 2: b"2\0\n"}
    assert as_ranks(3, body) == [expected, expected, None]


def test_a_key_of_the_board_holds_what_was_posted_last_below_it():
    def body(channel):
        if channel.rank == 0:
            channel.post("commit/2", b"two")
            channel.post("commit/1", b"one")
            channel.post("commits", b"not below")
        channel.barrier(10)
        before = channel.read("commit"), channel.read("commit/2"), channel.read("never posted")
        channel.barrier(10)
        if channel.rank == 0:
            channel.post("commit/1", b"")
        channel.barrier(10)
        return before, channel.read("commit")

    assert as_ranks(2, body) == [(({0: b"one"}, {0: b"two"}, {}), {0: b"two"})] * 2


class Counted(Store):
    """A store that counts what it is asked."""

    asked = 0

    def _request(self, method, path, value=None, *, wait=0):
        self.asked += 1
        return super()._request(method, path, value, wait=wait)

    def with_patience(self, patience):
        return self


def channels_over(store, size):
    return [
        RootedChannel(StoreTransport(store, "scope", rank, size), Signer(b"secret", "job"), rank, size)
        for rank in range(size)
    ]


def test_what_many_ranks_wrote_is_read_with_one_request():
    store, size = Counted("127.0.0.1", rendezvous()), 150
    ranks = channels_over(store, size)
    everything = {rank: b"%d" % rank for rank in range(size)}
    for channel in ranks:
        channel.post("step", everything[channel.rank])
    store.asked = 0
    assert ranks[3].read("step") == ranks[0].read("step") == everything
    assert store.asked == 2
    for channel in ranks[5:]:
        channel.report_failure(f"of {channel.rank}")
    store.asked = 0
    assert ranks[3].failures() == {rank: f"of {rank}" for rank in range(5, size)}
    assert store.asked == 2
    for channel in ranks[1:]:
        channel._transport.send(0, channel._signer.sign(b"x", purpose="part", sequence=0, sender=channel.rank))
    store.asked = 0
    assert ranks[0].exchange(b"y", timeout=10) == [b"y"] + [b"x"] * (size - 1)
    assert store.asked == 2


@pytest.mark.parametrize("forgery", ["tampered", "older", "of another rank", "of another job"])
def test_a_forged_post_is_passed_over(forgery):
    def body(rank):
        channel = open_rank(rank, 2, port)
        where = f"/{channel._transport._scope}/board-1"
        if rank == 1:
            channel.post("step", b"1")
            older = channel._transport._store.get(*where.split("/")[1:])
            channel.post("step", b"2")
            newer = channel._transport._store.get(*where.split("/")[1:])
            channel.barrier(10)  # rank 0 has read the newer one
            channel.barrier(10)
            signer = channel._signer
            later = (3).to_bytes(8, "big")
            text = newer[8 + 32 :]
            other = later + signer.sign(text, purpose="board", sequence=3, sender=0)
            another = Signer(signer._secret, f"{signer._job_id} 1")
            forged = {"tampered": later + newer[8:-1] + b"9", "older": older, "of another rank": other}
            aged = later + another.sign(text, purpose="board", sequence=3, sender=1)
            ask(port, "PUT", where, forged.get(forgery, aged))
            return channel.barrier(10)
        channel.barrier(10)
        seen = [channel.read("step")]
        channel.barrier(10)
        channel.barrier(10)
        return [*seen, channel.read("step")]

    port = rendezvous()
    assert on_threads(2, body) == [[{1: b"2"}] * 2, None]


def test_a_board_that_is_forged_from_the_start_is_empty():
    def body(channel):
        if channel.rank == 1:
            ask(channel._transport._store._port, "PUT", f"/{channel._transport._scope}/board-1", b"x" * 100)
        channel.barrier(10)
        return channel.read("step")

    assert as_ranks(2, body) == [{}, {}]


def test_who_waits_at_a_barrier_hears_of_whom():
    heard = {0: [], 1: []}

    def body(channel):
        if channel.rank == 2:
            return (time.sleep(2.5), channel.barrier(10))[1]
        channel.barrier(10, on_wait=heard[channel.rank].append)

    assert as_ranks(3, body) == [None] * 3
    assert [2] in heard[0]
    assert [2] in heard[1]
    assert len(heard[0] + heard[1]) < 8


@pytest.mark.extended
def test_a_store_that_is_gone_stops_nobody_from_failing():
    def body(rank):
        channels[rank] = open_rank(rank, 2, port)

    channels = {}
    server, port = start_server()
    on_threads(2, body)
    server.stop()  # its socket still listens, but nobody answers
    started = time.monotonic()
    channels[0].report_failure("text")
    assert channels[1].failures() == {}
    assert time.monotonic() - started < 4


def test_the_channel_counts_the_seconds_without_an_answer():
    class Silent:
        def post(self, message):
            time.sleep(0.1)
            raise LaunchError("does not answer")

        def posted(self):
            return {}

        def received_failures(self, known):
            return self.post(b"")

    channel = RootedChannel(Silent(), Signer(b"", ""), 0, 2)
    with pytest.raises(LaunchError):
        channel.post("key", b"value")
    assert channel.failures() == {}
    assert 0.2 <= channel.unanswered_s < 2.0
    before = channel.unanswered_s
    assert channel.read("key") != {}
    assert channel.unanswered_s == before


def test_a_store_that_nobody_listens_at_is_named():
    with pytest.raises(LaunchError, match=r"store at 127\.0\.0\.1:1 does not answer"):
        Store("127.0.0.1", 1, patience=0.1).get("scope", "key")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([2, 0, 1, 5], "ranks 0-2, 5"),
        (range(2000), "ranks 0-1999"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
        ([1, 3, 5, 7, 9, 11, 13, 15, 20, 21, 22], "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 3 more"),
    ],
)
def test_ranks_are_named_briefly(ranks, text):
    assert name_ranks(ranks) == text


@pytest.mark.parametrize("size", [3, 30])
def test_an_exchange_takes_each_rank_as_many_requests_however_many_ranks_there_are(monkeypatch, size):
    monkeypatch.setattr(rooted, "_wait_s", lambda deadline: 60)  # a second might be over on a busy machine
    port = rendezvous()
    stores = [Counted("127.0.0.1", port) for _ in range(size)]
    ranks = [channels_over(store, size)[rank] for rank, store in enumerate(stores)]

    def body(rank):
        first = ranks[rank].exchange(b"first", timeout=60)
        stores[rank].asked = 0
        return first, ranks[rank].exchange(b"%d" % rank, timeout=60), stores[rank].asked

    # Its part, in place of the one before, and the answer; of rank 0 the parts, and an answer in place of the last one.
    assert on_threads(size, body) == [([b"first"] * size, [b"%d" % rank for rank in range(size)], 3)] * size


def test_a_store_that_does_not_wait_is_asked_again(monkeypatch):
    http_server = pytest.importorskip("horovod.runner.http.http_server", reason="Horovod is not installed")
    monkeypatch.setattr(http_server.RendezvousHandler, "_await_values", lambda *_: None)
    late = threading.Event()

    def body(channel):
        if channel.rank == 2:
            assert late.wait(60)
        return channel.exchange(b"%d" % channel.rank, timeout=60)

    counted = Counted("127.0.0.1", rendezvous())
    threading.Thread(target=lambda: (wait_until(lambda: counted.asked > 5), late.set())).start()
    assert on_threads(3, lambda rank: body(channels_over(counted, 3)[rank])) == [[b"0", b"1", b"2"]] * 3


def test_who_is_missing_is_told_past_an_answer_that_is_none_and_forgotten_in_the_end():
    """As somebody has written it, or an earlier channel."""
    port = rendezvous()
    store, heard = Store("127.0.0.1", port), threading.Event()
    store.put("scope", "answer-0", b"forged")
    ranks = channels_over(store, 3)

    def on_wait(missing):
        if list(missing) == [2]:
            heard.set()

    def body(rank):
        if rank == 2:
            assert heard.wait(60)
        return ranks[rank].barrier(60, on_wait=on_wait if rank == 1 else None)

    assert on_threads(3, body) == [None] * 3
    assert store.get("scope", "state-0") is None
