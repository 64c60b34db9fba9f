"""What the rendezvous store forgets once all ranks have left a scope; its token: `test_uninvited`."""

from types import SimpleNamespace

import pytest

from hvdtrain.runtime.control.store import Store

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
