import platform
import threading
from importlib import metadata

import pytest

from hvdtrain.config.errors import ConfigError, DataError, LaunchError, MissingRankError, UserError
from hvdtrain.runtime.control import agreement
from hvdtrain.runtime.control.agreement import agree, installed_versions, on_first, together
from hvdtrain.runtime.control.channel import ControlChannel
from tests.unit.threaded_ranks import as_ranks


def raising(error):
    raise error


def test_versions_are_those_of_the_installed_packages():
    versions = installed_versions()
    assert versions["python"] == platform.python_version()
    assert versions["keras"] == metadata.version("keras")
    assert set(versions) == {"python", "tensorflow", "keras", "horovod"}


def test_ranks_with_the_same_facts_agree():
    assert as_ranks(3, lambda channel: agree(channel, {"a": "1", "b": "2"}, timeout=10)) == [None] * 3


def test_every_differing_fact_is_named_with_its_values_and_ranks():
    def body(channel):
        keras = {} if channel.rank == 2 else {"keras": "3.12"}
        facts = {"python": "3.11", "tensorflow": "2.20.0" if channel.rank == 1 else "2.21.0", **keras}
        agree(channel, facts, timeout=10)

    errors = as_ranks(3, body)
    assert {type(error) for error in errors} == {LaunchError}
    assert {str(error) for error in errors} == {
        "The ranks of this job do not fit together: tensorflow is 2.21.0 on ranks 0, 2 but 2.20.0 on rank 1; "
        "keras is 3.12 on ranks 0-1 but not given on rank 2."
    }


def test_together_gives_each_rank_its_own_result():
    assert as_ranks(3, lambda channel: together(channel, lambda: channel.rank, timeout=10)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("mistakes", "kind", "text"),
    [
        ([ConfigError("bad")] * 3, ConfigError, "bad"),
        ([None, DataError("no file"), None], DataError, "on rank 1: no file"),
        (
            [ConfigError("bad"), DataError("no file"), ConfigError("bad")],
            UserError,
            "on ranks 0, 2: bad\non rank 1: no file",
        ),
    ],
)
def test_mistakes_are_raised_on_all_ranks_with_the_ranks_that_made_them(mistakes, kind, text):
    def body(channel):
        mine = mistakes[channel.rank]
        together(channel, lambda: mine and raising(mine), timeout=10)

    errors = as_ranks(3, body)
    assert [(type(error), str(error)) for error in errors] == [(kind, text)] * 3
    assert [error.__cause__ for error in errors] == mistakes


def test_a_mistake_of_one_host_names_the_host(monkeypatch):
    def body(channel):
        local.name = f"node-{channel.rank // 2}"
        together(channel, lambda: channel.rank >= 2 and raising(DataError("no file")), timeout=10)

    local = threading.local()
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: getattr(local, "name", "node"))
    errors = as_ranks(4, body)
    assert {str(error) for error in errors} == {"on ranks 2-3 (node-1): no file"}


def test_an_error_that_is_not_the_users_rises_where_it_is():
    def body(channel):
        together(channel, lambda: channel.rank == 1 and raising(ZeroDivisionError()), timeout=0.3)

    assert [type(error) for error in as_ranks(3, body)] == [MissingRankError, ZeroDivisionError, MissingRankError]


def test_only_the_first_rank_acts_and_all_get_its_result():
    acted = []

    def body(channel):
        return on_first(channel, lambda: acted.append(channel.rank) or b"a\nb\0", timeout=10)

    assert as_ranks(3, body) == [b"a\nb\0"] * 3
    assert acted == [0]


def test_the_first_ranks_mistake_is_raised_on_all():
    errors = as_ranks(3, lambda channel: on_first(channel, lambda: raising(ConfigError("bad")), timeout=10))
    assert [(type(error), str(error)) for error in errors] == [(ConfigError, "bad")] * 3


def test_one_process_agrees_with_itself():
    channel = ControlChannel()
    agree(channel, {"a": "1"}, timeout=1)
    assert together(channel, lambda: 7, timeout=1) == 7
    assert on_first(channel, lambda: b"x", timeout=1) == b"x"
    with pytest.raises(ConfigError, match=r"^bad$"):
        together(channel, lambda: raising(ConfigError("bad")), timeout=1)
