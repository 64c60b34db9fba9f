"""Who is what among the ranks of a parameter server's job."""

import json
from dataclasses import replace

import pytest

from hvdtrain.config.errors import ConfigError, LaunchError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.open import LocalChannel
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.link import Link
from hvdtrain.runtime.parameter_server import Roles, roles_of
from hvdtrain.runtime.session import Session
from hvdtrain.runtime.strategies import OpenStrategy
from hvdtrain.runtime.tf_config import agreed_tf_config, check_given, tf_config

FOUR = Roles(2, 1)
ADDRESSES = ["a:1", "a:2", "b:3", "b:4"]


def place(rank, size):
    return replace(detect_environment({}), launcher="mpirun", hostname="b", rank=rank, size=size)


def given(roles, rank):
    addresses = [f"a:{port}" for port in range(1, 1 + len(roles.tasks))]
    return json.dumps(tf_config(addresses, roles.tasks, rank))


@pytest.mark.parametrize(
    ("size", "servers", "roles"),
    [(3, None, Roles(1, 1)), (4, None, Roles(2, 1)), (4, 2, Roles(1, 2)), (8, 3, Roles(4, 3))],
)
def test_the_first_leads_the_last_hold_the_parameters_and_those_between_train(size, servers, roles):
    found = roles_of(RuntimeConfig(backend="parameter_server", parameter_servers=servers), place(0, size))
    assert found == roles
    assert found.tasks[0] == ("chief", 0)
    assert found.tasks[1] == ("worker", 0)
    assert found.tasks[-1] == ("ps", roles.servers - 1)
    assert len(found.tasks) == size


@pytest.mark.parametrize(("size", "servers", "least"), [(1, None, 3), (2, None, 3), (2, 1, 3), (4, 3, 5)])
def test_ranks_that_leave_no_worker_are_refused(size, servers, least):
    with pytest.raises(LaunchError, match=f"start at least {least} ranks .*Received: {size}"):
        roles_of(RuntimeConfig(backend="parameter_server", parameter_servers=servers), place(0, size))


def test_servers_are_for_the_backend_that_has_them():
    with pytest.raises(ConfigError, match=r"parameter_servers is for .*backend='horovod' does not take it"):
        RuntimeConfig(backend="horovod", parameter_servers=1)
    with pytest.raises(ConfigError, match=r"parameter_servers must be at least 1\. Received: 0"):
        RuntimeConfig(backend="parameter_server", parameter_servers=0)


def test_tf_config_names_all_three_kinds():
    assert tf_config(ADDRESSES, FOUR.tasks, 2) == {
        "cluster": {"chief": ["a:1"], "worker": ["a:2", "b:3"], "ps": ["b:4"]},
        "task": {"type": "worker", "index": 1},
    }


def test_the_ranks_tell_one_another_free_ports():
    class Job:
        def exchange(self, payload, *, timeout):
            first = {"given": False, "host": "a", "port": 7}
            return [json.dumps(first).encode(), *[json.dumps({**first, "host": "c"}).encode()] * 2, payload]

    found = json.loads(agreed_tf_config(Job(), place(3, 4), {}, FOUR.tasks, timeout=1))
    assert found["task"] == {"type": "ps", "index": 0}
    assert (found["cluster"]["chief"], found["cluster"]["worker"]) == (["a:7"], ["c:7", "c:7"])
    (server,) = found["cluster"]["ps"]
    assert server.startswith("b:")


def test_a_tf_config_that_fits_is_taken():
    for rank in range(4):
        check_given(given(FOUR, rank), place(rank, 4), FOUR.tasks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            given(Roles(1, 2), 2),
            r"says ps 0 of 2 \(beside 1 chief, 1 worker\), and rank 2 of 4 by mpirun is worker 1 of 2",
        ),
        (given(FOUR, 1), "says worker 0 of 2 .*, and rank 2 of 4 by mpirun is worker 1 of 2"),
        (given(Roles(3, 1), 2), "says worker 1 of 3 .*, and rank 2 of 4 by mpirun is worker 1 of 2"),
        (json.dumps(tf_config(ADDRESSES, [("worker", i) for i in range(4)], 2)), "must hold chief and worker and ps"),
        ('{"cluster": {"ps": 3}, "task": {}}', "cannot be read"),
    ],
)
def test_a_tf_config_of_another_job_is_refused(text, message):
    with pytest.raises(LaunchError, match=message):
        check_given(text, place(2, 4), FOUR.tasks)


def test_who_leads_has_nobody_to_agree_with_and_who_serves_has_nothing_to_do():
    channel = object()
    link = Link(place(0, 4), channel, None)  # type: ignore[arg-type]
    chief = Session(
        link=link, world=None, plan=None, strategy=OpenStrategy(name="parameter_server", strategy=object(), roles=FOUR)
    )  # type: ignore[arg-type]
    server = Session(
        link=link,
        world=None,
        plan=None,
        strategy=OpenStrategy(name="parameter_server", strategy=None, roles=FOUR, server=object()),
    )  # type: ignore[arg-type]
    plain = Session(link=link, world=None, plan=None, strategy=OpenStrategy(name="mirrored", strategy=object()))  # type: ignore[arg-type]
    assert (chief.serves, server.serves, plain.serves) == (False, True, False)
    assert isinstance(chief.control, LocalChannel)
    assert plain.control is channel
