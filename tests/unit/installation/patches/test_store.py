"""What the rendezvous store forgets and what it tells of many keys; its token: `test_uninvited`."""

from types import SimpleNamespace

import pytest

from hvdtrain.runtime.control.store import Store
from tests.unit.threaded_ranks import ask, rendezvous

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
