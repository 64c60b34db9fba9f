"""What the rendezvous store forgets, what it tells of many keys, and how it waits; its token: `test_uninvited`."""

import contextlib
import http.client
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from hvdtrain.runtime.control.store import Store
from tests.unit.threaded_ranks import ask, rendezvous
from tests.waiting import wait_until

http_server = pytest.importorskip("horovod.runner.http.http_server", reason="Horovod is not installed")


def test_scopes_are_forgotten_one_by_one():
    """Rank 0 leaves two scopes before rank 1 leaves any."""
    plan = [SimpleNamespace(size=2, hostname="a", local_rank=rank, local_size=2, cross_size=1) for rank in range(2)]
    server = http_server.RendezvousServer(host="127.0.0.1")
    store = Store("127.0.0.1", server.start())
    server.init(plan)
    for scope in ("global", "local_a"):
        for rank in ("0", "1"):
            store.put(scope, rank, b"where it listens")
    for rank in ("0", "1"):
        for scope in ("global", "local_a"):
            store.delete(scope, rank)
    assert [store.get(scope, "0") for scope in ("global", "local_a")] == [None, None]
    server.stop()


@pytest.fixture
def store():
    return Store("127.0.0.1", rendezvous())


def test_several_values_are_read_at_once_whatever_they_hold(store):
    written = {"a": b"1", "b": b"", "c": bytes(range(256)), "d": b"\r\n\r\n", "e": b"x" * 300_000}
    for key, value in written.items():
        store.put("scope", key, value)
    assert store.get_all("scope", [*written, "missing"]) == {key: value for key, value in written.items() if value}
    assert store.get_all("scope", ["c"]) == {"c": written["c"]}
    assert store.get_all("scope", []) == store.get_all("nowhere", ["a", "b"]) == {}


def test_keys_by_the_thousand_are_read(store):
    for key in range(0, 3000, 250):
        store.put("scope", f"part-1234567-{key}", b"%d" % key)
    found = store.get_all("scope", [f"part-1234567-{key}" for key in range(3000)])
    assert list(found.values()) == [b"%d" % key for key in range(0, 3000, 250)]


def test_long_values_come_in_several_messages(store):
    written = {"short": b"s", "long": bytes(2**24 - 1), "longer": bytes(2**24 + 1), "last": b"l"}
    for key, value in written.items():
        store.put("scope", key, value)
    assert store.get_all("scope", list(written)) == written
    assert store.get_all("scope", ["longer", "none", "long"]) == {key: written[key] for key in ("longer", "long")}
    least = Store("127.0.0.1", store._port, most=10)
    assert least.get_all("scope", ["short", "long", "last"]) == {"short": b"s", "last": b"l"}


def test_a_store_that_knows_no_lists_is_asked_for_each(monkeypatch, store):
    monkeypatch.delattr(http_server.RendezvousHandler, "do_GET")
    store.put("scope", "a", b"1")
    store.put("scope", "c", b"3")
    assert store.get_all("scope", ["a", "b", "c"]) == {"a": b"1", "c": b"3"}


@pytest.mark.parametrize("path", ["/a,b", "/,", "/,/,/,", "/scope/,", "//,"])
def test_a_malformed_path_ends_no_server(store, path):
    status, body = ask(store._port, "GET", path)
    assert (status, body) in [(200, b""), (404, b""), (400, b"")]
    store.put("scope", "a", b"1")
    assert store.get("scope", "a") == b"1"


@pytest.fixture(params=["horovodrun", "elastic horovodrun"])
def waited(request):
    """A store of its own, and its server, whose `awaited` shows who waits."""
    server = http_server.RendezvousServer(host="127.0.0.1")
    handler = http_server.RendezvousHandler
    if request.param.startswith("elastic"):
        from horovod.runner.elastic.rendezvous import create_rendezvous_handler

        handler = create_rendezvous_handler(None)
    yield Store("127.0.0.1", server.start(handler)), server._httpd
    server.stop()


def test_whoever_waits_has_the_value_with_the_request_that_asked_before_it_was_written(waited):
    store, server = waited
    with ThreadPoolExecutor() as pool:
        one, other = (pool.submit(store.get, "scope", "a", wait=60) for _ in range(2))
        wait_until(lambda: len(server.awaited.get(("scope", "a"), ())) == 2)
        store.put("scope", "a", b"")  # as if it were not written
        store.put("elsewhere", "a", b"0")
        assert len(server.awaited["scope", "a"]) == 2
        store.put("scope", "a", b"1")
        assert one.result(50) == other.result(50) == b"1"
    assert server.awaited == {}


def test_of_several_values_all_are_waited_for(waited):
    store, server = waited
    store.put("scope", "b", b"2")
    with ThreadPoolExecutor() as pool:
        found = pool.submit(store.get_all, "scope", ["a", "b", "c"], wait=60)
        for key in ("a", "c"):
            wait_until(lambda key=key: ("scope", key) in server.awaited)
            assert not found.done()
            store.put("scope", key, key.encode())
        assert found.result(50) == {"a": b"a", "b": b"2", "c": b"c"}
    assert server.awaited == {}


def test_a_wait_that_ends_answers_with_what_is_there_and_leaves_others_waiting(waited):
    store, server = waited
    store.put("scope", "b", b"2")
    with ThreadPoolExecutor() as pool:
        longer = pool.submit(store.get, "scope", "a", wait=60)
        wait_until(lambda: ("scope", "a") in server.awaited)
        assert store.get_all("scope", ["a", "b", "c"], wait=1) == {"b": b"2"}
        assert store.get("scope", "c", wait=1) is None
        assert list(server.awaited) == [("scope", "a")]
        store.put("scope", "a", b"1")
        assert longer.result(50) == b"1"


@pytest.mark.parametrize(
    "prefer", ["wait=1000000", "wait=", "wait=-1", "wait=1.5", "wait=60, wait=60", "respond-async"]
)
def test_other_preferences_are_passed_over(store, prefer):
    connection = http.client.HTTPConnection("127.0.0.1", store._port, timeout=30)
    connection.request("GET", "/scope/missing", headers={"Prefer": prefer})
    assert connection.getresponse().status == 404


def test_many_ranks_may_call_before_one_is_answered():
    server = http_server.RendezvousHTTPServer(("127.0.0.1", 0), http_server.RendezvousHandler, False)
    with contextlib.ExitStack() as calls:
        calls.callback(server.server_close)
        for _ in range(300):
            calls.enter_context(socket.create_connection(server.server_address[:2], timeout=10))


@pytest.mark.parametrize(
    ("error", "said"), [(BrokenPipeError(), ""), (ConnectionResetError(), ""), (KeyError("a"), "'a'")]
)
def test_a_rank_that_is_gone_when_its_answer_comes_is_nothing_to_talk_about(capsys, error, said):
    with http_server.RendezvousHTTPServer(("127.0.0.1", 0), http_server.RendezvousHandler, False) as server:
        try:
            raise error
        except Exception:
            server.handle_error(None, ("127.0.0.1", 1))
    assert said in capsys.readouterr().err if said else capsys.readouterr().err == ""
