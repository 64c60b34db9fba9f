"""What an uninvited client of the rendezvous store of `horovodrun --gloo` can read and write, and what comes of it.

`guarded` is the store of a patched Horovod's `horovodrun`; `open` is that of Horovod without the patches, or started by
hand, which cannot keep anybody out: there the messages themselves are protected.
"""

import base64
import hashlib
import http.client
import pickle
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.store import MOST_BYTES, Store
from hvdtrain.runtime.launchers import detect_environment
from tests.unit.threaded_ranks import ask, on_threads, open_rank, rendezvous, variables

TOKEN = "0123456789abcdef"
KEYS = [f"/hvdtrain-lobby/{key}" for key in ("part-0-0", "part-0-1", "answer-0", "failed", "board-1")] + [
    "/global/0",
    "/rank_and_size/localhost:0",
    "/worker_addresses/localhost:0",
    "/setup.cfg",
    "/",
]


@pytest.fixture(scope="module")
def guarded():
    """The port of a guarded store."""
    return guarded_server().start()


def guarded_server():
    http_server = pytest.importorskip("horovod.runner.http.http_server", reason="Horovod is not installed")
    return http_server.RendezvousServer(host="127.0.0.1", token=TOKEN)


def member(port, rank, size=2):
    return open_rank(rank, size, port, HOROVOD_GLOO_RENDEZVOUS_ADDR=f"127.0.0.1:{port}/{TOKEN}")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "POST"])
def test_a_guarded_store_answers_nobody_without_the_token(guarded, method):
    store = Store(f"127.0.0.1:{guarded}/{TOKEN}", guarded)
    store.put("global", "0", b"where rank 0 listens")
    for key in KEYS:
        for begin in (
            "",
            "/",
            f"/{TOKEN[:-1]}x:{guarded}",
            f"/x:{guarded}",
            f"/{TOKEN}:1",
            f"/{TOKEN}",
            "/%30" + TOKEN[1:],
        ):
            assert ask(guarded, method, begin + key, b"forged" if method == "PUT" else None) == (403, b"")
    assert store.get("global", "0") == b"where rank 0 listens"


def test_a_guarded_store_serves_ranks(guarded):
    def body(rank):
        channel = member(guarded, rank)
        channel.post("step", b"%d" % rank)
        channel.barrier(10)
        return channel.exchange(b"of %d" % rank, timeout=10), channel.read("step")

    assert on_threads(2, body) == [([b"of 0", b"of 1"], {0: b"0", 1: b"1"})] * 2


@pytest.mark.parametrize(
    ("method", "path", "length", "status"),
    [
        ("PUT", "/scope/key", str(MOST_BYTES + 1), 413),
        ("PUT", "/scope/key", "-1", 400),
        ("PUT", "/scope/key", "many", 400),
        ("PUT", "/scope/too/many", "0", 400),
        ("PUT", "/scope", "0", 400),
        ("HEAD", "/scope/key", "0", 400),
        ("GET", "/scope/key", "0", 404),
    ],
)
def test_a_guarded_store_answers_what_makes_no_sense(guarded, capfd, method, path, length, status):
    """A value that is too large is refused before it is sent."""
    with socket.create_connection(("127.0.0.1", guarded), timeout=5) as connection:
        head = f"{method} /{TOKEN}:{guarded}{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).split()[1] == str(status).encode()
    assert "Traceback" not in capfd.readouterr().err


def test_a_guarded_store_outlives_noise(guarded, capfd):
    for noise in (b"\x00\xff" * 1000, b"GET " + b"x" * 70_000, b"PUT / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", guarded), timeout=5) as connection:
            connection.sendall(noise)
    store = Store(f"127.0.0.1:{guarded}/{TOKEN}", guarded)
    store.put("scope", "key", b"value")
    assert store.get("scope", "key") == b"value"


def test_the_token_is_shown_to_nobody(guarded):
    with pytest.raises(LaunchError) as raised:
        Store(f"127.0.0.1:1/{TOKEN}", 1, patience=0.1).get("scope", "key")
    assert TOKEN not in str(raised.value)
    place = detect_environment(variables(0, 2, guarded, HOROVOD_GLOO_RENDEZVOUS_ADDR=f"127.0.0.1:{guarded}/{TOKEN}"))
    assert place.job_id == f"127.0.0.1:{guarded}"


def test_a_guarded_store_unpickles_for_nobody(tmp_path):
    """Under `--host-discovery-script` Horovod's own store unpickles what is written to worker_addresses."""
    rendezvous = pytest.importorskip("horovod.runner.elastic.rendezvous", reason="Horovod is not installed")

    class Hostile:
        def __reduce__(self):
            return Path.touch, (tmp_path / "made",)

    server = guarded_server()
    port = server.start(rendezvous.create_rendezvous_handler(None))
    message = base64.b64encode(pickle.dumps(Hostile()))
    assert ask(port, "PUT", "/worker_addresses/localhost:0", message)[0] == 403
    assert not (tmp_path / "made").exists()
    with pytest.raises(http.client.HTTPException):  # whoever has the token is a rank, and trusted
        ask(port, "PUT", f"/{TOKEN}:{port}/worker_addresses/localhost:0", message)
    assert (tmp_path / "made").exists()


def test_a_guarded_store_tells_ranks_of_an_elastic_job_their_next_place():
    rendezvous = pytest.importorskip("horovod.runner.elastic.rendezvous", reason="Horovod is not installed")
    from hvdtrain.runtime.elastic import take_next_place

    slot = SimpleNamespace(rank=1, size=3, to_response_string=lambda: "1,3,0,1,1,3")
    driver = SimpleNamespace(record_ready=lambda *place: None, get_slot_info=lambda *place: slot)
    port = guarded_server().start(rendezvous.create_rendezvous_handler(driver))
    environ = variables(0, 2, port, HOROVOD_GLOO_RENDEZVOUS_ADDR=f"127.0.0.1:{port}/{TOKEN}", HOROVOD_HOSTNAME="a")
    take_next_place(environ, timeout=10)
    assert (environ["HOROVOD_RANK"], environ["HOROVOD_SIZE"]) == ("1", "3")


# -- a store without a token --

FORGED = b"x" * 100


def test_what_is_written_before_the_job_is_passed_over():
    port = rendezvous()
    for key in KEYS[:5]:
        ask(port, "PUT", key, FORGED)

    def body(rank):
        time.sleep(0.3 * rank)
        return open_rank(rank, 3, port).exchange(b"of %d" % rank, timeout=10)

    assert on_threads(3, body) == [[b"of 0", b"of 1", b"of 2"]] * 3


def test_a_greeting_that_is_overwritten_or_deleted_is_sent_again():
    """Rank 1 greets at once, and what it wrote is replaced before rank 0 comes."""
    port = rendezvous()

    def body(rank):
        if rank == 0:
            while ask(port, "GET", "/hvdtrain-lobby/part-0-1")[0] != 200:
                time.sleep(0.01)
            ask(port, "PUT", "/hvdtrain-lobby/part-0-1", FORGED)
        return open_rank(rank, 2, port).exchange(b"of %d" % rank, timeout=10)

    assert on_threads(2, body) == [[b"of 0", b"of 1"]] * 2


def test_a_greeting_too_long_to_be_one_is_not_read():
    port = rendezvous()
    ask(port, "PUT", "/hvdtrain-lobby/part-0-1", b"x" * (2**22 + 1))
    transport = Store("127.0.0.1", port, most=2**22)
    assert transport.get("hvdtrain-lobby", "part-0-1") is None
    assert Store("127.0.0.1", port).get("hvdtrain-lobby", "part-0-1") is not None


def test_where_ranks_talk_cannot_be_found_by_what_is_in_the_store():
    """Neither the random numbers, which travel in clear text, nor the names of earlier channels lead there."""
    port, scopes, seen = rendezvous(), {}, []

    def body(rank):
        channel = open_rank(rank, 2, port)
        scopes[rank] = channel._transport._scope
        return channel.barrier(10)

    def eavesdrop():
        while not done.is_set():
            seen.append(ask(port, "GET", "/hvdtrain-lobby/answer-0")[1])

    done = threading.Event()
    spy = threading.Thread(target=eavesdrop)
    spy.start()
    on_threads(2, body)
    done.set()
    spy.join()
    numbers = max(seen, key=len)[-32:]
    assert len(numbers) == 32
    assert scopes[0] == scopes[1]
    assert hashlib.sha256(numbers).hexdigest()[:32] not in scopes[0]
    before = scopes[0]
    assert on_threads(2, body) == [None, None]
    assert scopes[0] != before


def test_garbage_instead_of_the_number_of_a_failed_rank_hides_no_failure():
    port = rendezvous()

    def body(rank):
        channel = open_rank(rank, 2, port)
        if rank == 1:
            channel.report_failure("the cause")
            ask(port, "PUT", f"/{channel._transport._scope}/failed", b"nobody")
        channel.barrier(10)
        return channel.failures()

    assert on_threads(2, body) == [{1: "the cause"}, {}]
