"""Python objects between ranks: what is sent, what is refused, and who is waited for."""

from types import SimpleNamespace

import numpy as np
import pytest

import hvdtrain
from hvdtrain.config.errors import ConfigError, LaunchError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime import objects
from hvdtrain.runtime.objects import object_of_root, objects_of_all, wait_for_all
from tests.unit.threaded_ranks import as_ranks


def ranks(size, body):
    return as_ranks(
        size, lambda channel: body(SimpleNamespace(control=channel, config=RuntimeConfig(load_timeout=10.0)))
    )


def test_each_rank_gets_the_objects_of_all():
    everyone = [{"rank": rank, "array": np.full(3, rank)} for rank in range(3)]
    for received in ranks(3, lambda mine: objects_of_all(mine, everyone[mine.control.rank], None)):
        assert [each["rank"] for each in received] == [0, 1, 2]
        assert received[2]["array"].tolist() == [2, 2, 2]


def test_the_root_keeps_its_own_object_and_the_others_get_a_copy():
    given = {"a": [1]}
    received = ranks(2, lambda mine: object_of_root(mine, given if mine.control.rank == 1 else None, 1, None))
    assert received == [given, given]
    assert received[1] is given
    assert received[0] is not given


def test_objects_that_are_too_large_are_refused_on_every_rank(monkeypatch):
    monkeypatch.setattr(objects, "MOST_BYTES", 100)
    received = ranks(2, lambda mine: objects_of_all(mine, "x" * (60 if mine.control.rank else 1), None))
    for error in received:
        assert isinstance(error, ConfigError)
        assert "rank 1: hvdtrain.gather_object(): The objects of all ranks must not be larger than 100" in str(error)
        assert "may send 50." in str(error)


def test_what_is_no_call_of_this_kind_is_another_call():
    def body(mine):
        return mine.control.exchange(b"\x01\xff", timeout=5) if mine.control.rank else wait_for_all(mine, "", None)

    error = ranks(2, body)[0]
    assert isinstance(error, ConfigError)
    assert "barrier() was called, and another rank did something else" in str(error)


def test_a_rank_that_does_not_come_is_named():
    error = ranks(3, lambda mine: wait_for_all(mine, "", 0.5) if mine.control.rank < 2 else None)[0]
    assert isinstance(error, LaunchError)
    assert "hvdtrain.barrier(): No message from rank 2 of 3 within 0.5 s" in str(error)


@pytest.mark.usefixtures("session")
def test_a_process_that_is_alone_sends_to_itself():
    given = lambda: 1  # noqa: E731 (what pickle does not take)
    hvdtrain.barrier()
    assert hvdtrain.broadcast_object(given) is given
    assert hvdtrain.gather_object(given) == [given]
    assert hvdtrain.is_initialized()
    with pytest.raises(ConfigError, match=r"root_rank must be a rank of the job, 0 to 0. Received: 1"):
        hvdtrain.broadcast_object(given, root_rank=1)
    with pytest.raises(ConfigError, match=r"timeout must be positive, in seconds. Received: 0"):
        hvdtrain.barrier(timeout=0)


@pytest.mark.usefixtures("no_session")
def test_without_a_session_nothing_is_initialized():
    assert not hvdtrain.is_initialized()


@pytest.mark.usefixtures("session")
def test_rank_zero_only_keeps_what_the_function_is():
    @hvdtrain.rank_zero_only
    def save(path, *, overwrite=False):
        """Save it."""
        return path, overwrite

    assert (save.__name__, save.__doc__) == ("save", "Save it.")
    assert save("a", overwrite=True) == ("a", True)
