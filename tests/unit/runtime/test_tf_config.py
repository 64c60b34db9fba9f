import json
from dataclasses import replace

import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.tf_config import addresses_of, agreed_tf_config, check_given, tf_config, workers_only

WORKERS = workers_only(2)
TWO = tf_config(["a:1", "b:2"], WORKERS, 1)


@pytest.fixture
def second():
    return replace(detect_environment({}), launcher="mpirun", hostname="b", rank=1, size=2)


class Job:
    """A channel on which rank 0 has spoken already."""

    def __init__(self, first):
        self.first = json.dumps(first).encode()

    def exchange(self, payload, *, timeout):
        return [self.first, payload]


def test_tf_config_names_the_workers_and_this_one_among_them():
    assert TWO == {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}


def test_ranks_of_one_machine_need_no_name_service():
    assert addresses_of([("a", 1), ("a", 2)]) == ["127.0.0.1:1", "127.0.0.1:2"]
    assert addresses_of([("a", 1), ("b", 1)]) == ["a:1", "b:1"]


def test_the_ranks_tell_one_another_free_ports(second):
    text = agreed_tf_config(Job({"given": False, "host": "a", "port": 7}), second, {}, WORKERS, timeout=1)
    found = json.loads(text)
    assert found["task"] == {"type": "worker", "index": 1}
    first, own = found["cluster"]["worker"]
    host, port = own.split(":")
    assert (first, host) == ("a:7", "b")
    assert 1024 < int(port) < 65536


def test_a_tf_config_that_is_set_is_taken_as_it_is(second):
    text = json.dumps(TWO)
    job = Job({"given": True, "host": "a", "port": 7})
    assert agreed_tf_config(job, second, {"TF_CONFIG": text}, WORKERS, timeout=1) == text


def test_some_ranks_only_are_told_a_tf_config(second):
    with pytest.raises(LaunchError, match="TF_CONFIG is set on some ranks only"):
        agreed_tf_config(Job({"given": True, "host": "a", "port": 7}), second, {}, WORKERS, timeout=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (tf_config(["a:1", "b:2"], WORKERS, 0), "says worker 0 of 2, and rank 1 of 2 by mpirun is worker 1 of 2"),
        (
            tf_config(["a:1", "b:2", "c:3"], workers_only(3), 1),
            "says worker 1 of 3, and rank 1 of 2 by mpirun is worker 1",
        ),
        ({**TWO, "cluster": {**TWO["cluster"], "ps": ["c:3"]}}, "must hold worker tasks only.*Received: worker, ps"),
        ({**TWO, "task": {"type": "evaluator", "index": 0}}, "must hold worker tasks only.*for evaluator 0"),
        ({"cluster": {}}, "cannot be read"),
        ([1], "cannot be read"),
    ],
)
def test_a_tf_config_of_another_job_is_refused(second, given, message):
    with pytest.raises(LaunchError, match=message):
        check_given(json.dumps(given), second, WORKERS)


def test_a_tf_config_that_is_no_json_is_refused(second):
    with pytest.raises(LaunchError, match="cannot be read"):
        check_given('{"cluster', second, WORKERS)


def test_a_worker_that_nobody_started_is_told_how():
    with pytest.raises(LaunchError, match=r"names 2 workers.*start them with horovodrun or mpirun"):
        check_given(json.dumps(TWO), detect_environment({}), workers_only(1))
