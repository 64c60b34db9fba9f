"""What is set before MPI and Horovod start, and what the user's own settings keep."""

from pathlib import Path

import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.tuning import LARGE_MESSAGES, TUNED, fuse_nothing, fuses, outlast_hangs, set_exchange_defaults


def test_what_the_user_set_stays():
    environ = {"HOROVOD_CYCLE_TIME": "3"}
    set_exchange_defaults(environ)
    assert (environ["HOROVOD_CYCLE_TIME"], environ["OMPI_MCA_mpi_yield_when_idle"]) == ("3", "1")
    assert environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "300"


@pytest.mark.parametrize(
    ("given", "hang_timeout", "used"), [(None, 300.0, "360"), (None, 0.0, "300"), ("30", 300.0, "30")]
)
def test_gloo_waits_longer_than_the_watchdog(given, hang_timeout, used):
    environ = {} if given is None else {"HOROVOD_GLOO_TIMEOUT_SECONDS": given}
    set_exchange_defaults(environ)
    outlast_hangs(environ, hang_timeout)
    assert environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] == used


def test_deterministic_jobs_fuse_nothing():
    for environ in ({}, {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_AUTOTUNE": "0"}):
        set_exchange_defaults(environ)
        fuse_nothing(environ)
        assert (environ["HOROVOD_FUSION_THRESHOLD"], fuses(environ)) == ("0", False)
    assert fuses({})


@pytest.mark.parametrize(("name", "value"), [("HOROVOD_FUSION_THRESHOLD", "1024"), ("HOROVOD_AUTOTUNE", "1")])
def test_who_asks_horovod_to_fuse_otherwise_is_told(name, value):
    environ = {name: value}
    set_exchange_defaults(environ)
    with pytest.raises(LaunchError, match=f"deterministic=True.*Received: {name}={value}. Take it out"):
        fuse_nothing(environ)
    assert environ[name] == value


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, "^ofi"), ("^openib", "^openib,ofi"), ("^ofi,openib", "^ofi,openib"), ("self,tcp", "self,tcp")],
)
def test_the_transport_that_ends_late_is_left_out(before, after):
    environ = {} if before is None else {"OMPI_MCA_btl": before}
    set_exchange_defaults(environ)
    assert environ["OMPI_MCA_btl"] == after


def test_large_messages_follow_rules_of_ours_unless_the_user_has_chosen_an_algorithm():
    environ = {}
    set_exchange_defaults(environ)
    assert environ.items() >= LARGE_MESSAGES.items()
    theirs = {TUNED + "allreduce_algorithm": "3"}
    environ = dict(theirs)
    set_exchange_defaults(environ)
    assert {name: value for name, value in environ.items() if name.startswith(TUNED)} == theirs


def test_the_rules_are_whole():
    """Open MPI ignores a file that it cannot read to its end."""
    lines = Path(LARGE_MESSAGES[TUNED + "dynamic_rules_filename"]).read_text().splitlines()
    numbers = iter([int(word) for line in lines for word in line.split("#")[0].split()])
    rules = {}
    assert (next(numbers), next(numbers)) == (1, 2), "MPI_Allreduce alone"
    for _ in range(next(numbers)):
        ranks = next(numbers)
        rules[ranks] = [tuple(next(numbers) for _ in range(4)) for _ in range(next(numbers))]
    assert not list(numbers)
    assert rules == {2: [(0, 0, 0, 0), (4 * 2**20, 5, 0, 2**20)], 5: [(0, 0, 0, 0)]}
