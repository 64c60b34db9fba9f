"""What the garbage collector looks through."""

import gc

import pytest

from hvdtrain.runtime.heap import kept_for_good


@pytest.fixture
def collector():
    enabled = gc.isenabled()
    gc.enable()
    yield
    gc.unfreeze()
    if not enabled:
        gc.disable()


class Node:
    """An object that may be part of a cycle."""


def test_what_the_body_makes_is_never_looked_at_again(collector):
    with kept_for_good():
        assert not gc.isenabled()
        made = [Node() for _ in range(1000)]
    assert gc.isenabled()
    assert not any(isinstance(found, Node) for found in gc.get_objects())
    assert len(made) == 1000


def test_what_comes_later_is_collected(collector):
    with kept_for_good():
        pass
    node = Node()
    node.me = node
    del node
    assert gc.collect() >= 1


def test_a_collector_that_was_off_stays_off(collector):
    gc.disable()
    with pytest.raises(ImportError), kept_for_good():
        raise ImportError
    assert not gc.isenabled()
