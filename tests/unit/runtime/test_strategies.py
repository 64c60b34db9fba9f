"""Which backends can be chosen where, and who is what in their cluster; what they compute is in tests/distributed."""

import json
from dataclasses import replace

import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.config.runtime import IN_ONE_PROCESS, RuntimeConfig
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.link import Link
from hvdtrain.runtime.session import Session, wants_horovod
from hvdtrain.runtime.strategies import (
    OpenStrategy,
    Roles,
    addresses_of,
    agreed_tf_config,
    check_given,
    open_strategy,
    roles_of,
    tf_config,
    workers_only,
)

ALONE = detect_environment({})
WORKERS = workers_only(2)
TWO = tf_config(["a:1", "b:2"], WORKERS, 1)
FOUR = Roles(2, 1)
ADDRESSES = ["a:1", "a:2", "b:3", "b:4"]


def opened(backend, **options):
    return open_strategy(RuntimeConfig(backend=backend, **options), ALONE, ControlChannel(), timeout=1)


def place(rank, size):
    return replace(ALONE, launcher="mpirun", hostname="b", rank=rank, size=size)


def given(roles, rank):
    return tf_config([f"a:{port}" for port in range(1, 1 + len(roles.tasks))], roles.tasks, rank)


@pytest.mark.parametrize("backend", IN_ONE_PROCESS)
def test_backends_of_one_process_refuse_more_of_them(backend):
    two = replace(ALONE, launcher="mpirun", size=2)
    with pytest.raises(LaunchError, match=f"backend='{backend}' trains in one process, but mpirun started 2"):
        wants_horovod(RuntimeConfig(backend=backend), two)
    assert not wants_horovod(RuntimeConfig(backend=backend), ALONE)


def test_a_tpu_that_is_not_there_or_cannot_be_reached_is_named(monkeypatch):
    import tensorflow as tf

    def refuse(tpu):
        raise ValueError(f"no {tpu}")

    monkeypatch.delenv("TPU_NAME", raising=False)
    with pytest.raises(LaunchError, match="There is no TPU"):
        opened("tpu")
    monkeypatch.setenv("TPU_NAME", "far")
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", refuse)
    with pytest.raises(LaunchError, match="The TPU 'far' cannot be used: no far"):
        opened("tpu")


def test_nccl_without_gpus_is_refused():
    with pytest.raises(LaunchError, match="communication='nccl' needs GPUs"):
        opened("multi_worker_mirrored", communication="nccl")


def test_workers_that_come_too_late_are_told_so(monkeypatch):
    import tensorflow as tf

    tf.constant(1.0)
    monkeypatch.setenv("TF_CONFIG", "")
    with pytest.raises(LaunchError, match=r"must be chosen before TensorFlow does any work.*call hvdtrain.init\(\)"):
        opened("multi_worker_mirrored")


def test_one_device_is_one_replica():
    assert opened("one_device").strategy.num_replicas_in_sync == 1


# -- TF_CONFIG --


def test_tf_config_names_all_tasks_and_this_one_among_them():
    assert TWO == {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
    assert tf_config(ADDRESSES, FOUR.tasks, 2) == {
        "cluster": {"chief": ["a:1"], "worker": ["a:2", "b:3"], "ps": ["b:4"]},
        "task": {"type": "worker", "index": 1},
    }


def test_ranks_of_one_machine_need_no_name_service():
    assert addresses_of([("a", 1), ("a", 2)]) == ["127.0.0.1:1", "127.0.0.1:2"]
    assert addresses_of([("a", 1), ("b", 1)]) == ["a:1", "b:1"]


class Job:
    """A channel on which the lower ranks have spoken already."""

    def __init__(self, *hosts, given=False):
        self.others = [json.dumps({"given": given, "host": host, "port": 7}).encode() for host in hosts]

    def exchange(self, payload, *, timeout):
        return [*self.others, payload]


def test_the_ranks_tell_one_another_free_ports():
    found = json.loads(agreed_tf_config(Job("a", "c", "c"), place(3, 4), {}, FOUR.tasks, timeout=1))
    assert found["task"] == {"type": "ps", "index": 0}
    assert (found["cluster"]["chief"], found["cluster"]["worker"]) == (["a:7"], ["c:7", "c:7"])
    ((host, port),) = (server.split(":") for server in found["cluster"]["ps"])
    assert host == "b"
    assert 1024 < int(port) < 65536


def test_a_tf_config_that_is_set_is_taken_as_it_is_on_all_ranks_or_none():
    text, job = json.dumps(TWO), Job("a", given=True)
    assert agreed_tf_config(job, place(1, 2), {"TF_CONFIG": text}, WORKERS, timeout=1) == text
    with pytest.raises(LaunchError, match="TF_CONFIG is set on some ranks only"):
        agreed_tf_config(job, place(1, 2), {}, WORKERS, timeout=1)


def test_a_tf_config_that_fits_is_taken():
    for rank in range(4):
        check_given(json.dumps(given(FOUR, rank)), place(rank, 4), FOUR.tasks)


@pytest.mark.parametrize(
    ("found", "environment", "tasks", "message"),
    [
        *(
            (found, place(1, 2), WORKERS, message)
            for found, message in (
                (tf_config(["a:1", "b:2"], WORKERS, 0), "worker 0 of 2, and rank 1 of 2 by mpirun is worker 1 of 2"),
                (tf_config(["a:1", "b:2", "c:3"], workers_only(3), 1), "says worker 1 of 3, and rank 1 of 2 by mpirun"),
                ({**TWO, "cluster": {**TWO["cluster"], "ps": ["c:3"]}}, "worker tasks only.*Received: worker, ps"),
                ({**TWO, "task": {"type": "evaluator", "index": 0}}, "must hold worker tasks only.*for evaluator 0"),
                ({"cluster": {}}, "cannot be read"),
                ([1], "cannot be read"),
            )
        ),
        *(
            (found, place(2, 4), FOUR.tasks, message)
            for found, message in (
                (given(Roles(1, 2), 2), r"says ps 0 of 2 \(beside 1 chief, 1 worker\), and rank 2 of 4 by mpirun is"),
                (given(FOUR, 1), "says worker 0 of 2 .*, and rank 2 of 4 by mpirun is worker 1 of 2"),
                (given(Roles(3, 1), 2), "says worker 1 of 3 .*, and rank 2 of 4 by mpirun is worker 1 of 2"),
                (tf_config(ADDRESSES, workers_only(4), 2), "must hold chief and worker and ps"),
                ({"cluster": {"ps": 3}, "task": {}}, "cannot be read"),
            )
        ),
        (TWO, ALONE, workers_only(1), "names 2 workers.*start them with horovodrun or mpirun"),
    ],
)
def test_a_tf_config_of_another_job_is_refused(found, environment, tasks, message):
    text = json.dumps(found)
    with pytest.raises(LaunchError, match=message):
        check_given(text, environment, tasks)
    with pytest.raises(LaunchError, match="cannot be read"):
        check_given(text[:-1], environment, tasks)


# -- the ranks of a parameter server's job --


@pytest.mark.parametrize(
    ("size", "servers", "roles"),
    [(3, None, Roles(1, 1)), (4, None, Roles(2, 1)), (4, 2, Roles(1, 2)), (8, 3, Roles(4, 3))],
)
def test_the_first_leads_the_last_hold_the_parameters_and_those_between_train(size, servers, roles):
    found = roles_of(RuntimeConfig(backend="parameter_server", parameter_servers=servers), place(0, size))
    assert found == roles
    assert (found.tasks[0], found.tasks[1]) == (("chief", 0), ("worker", 0))
    assert found.tasks[-1] == ("ps", roles.servers - 1)
    assert len(found.tasks) == size


@pytest.mark.parametrize(("size", "servers", "least"), [(1, None, 3), (2, None, 3), (2, 1, 3), (4, 3, 5)])
def test_ranks_that_leave_no_worker_are_refused(size, servers, least):
    with pytest.raises(LaunchError, match=f"start at least {least} ranks .*Received: {size}"):
        roles_of(RuntimeConfig(backend="parameter_server", parameter_servers=servers), place(0, size))


def test_who_leads_has_nobody_to_agree_with_and_who_serves_has_nothing_to_do():
    channel = object()
    link = Link(place(0, 4), channel, None)  # type: ignore[arg-type]

    def session(**of_strategy):
        return Session(link=link, world=None, plan=None, strategy=OpenStrategy(**of_strategy))  # type: ignore[arg-type]

    chief = session(name="parameter_server", strategy=object(), roles=FOUR)
    server = session(name="parameter_server", strategy=None, roles=FOUR, server=object())
    plain = session(name="mirrored", strategy=object())
    assert (chief.serves, server.serves, plain.serves) == (False, True, False)
    assert type(chief.control) is ControlChannel
    assert plain.control is channel
