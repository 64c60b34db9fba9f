"""Reading and decoding in other processes, by tf.data service."""

import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.files.blobs import Blobs
from hvdtrain.data.pipeline import ReadOptions, SourceEvaluation, SourceTraining
from hvdtrain.data.service import processes
from hvdtrain.data.service.served import distributed, served
from hvdtrain.data.service.use import addresses_in, refuse_python
from hvdtrain.training.inputs import training_data
from tests.waiting import wait_until

X, Y = np.arange(50, dtype="float32"), np.arange(50)


@pytest.fixture(scope="module")
def addresses():
    return tuple(processes.start_local(2))


class Decoded:
    """Samples that are made of their numbers."""

    name, size, heavy, finite = "numbers", 50, True, False
    spec = (tf.TensorSpec([2], tf.float32), tf.TensorSpec([], tf.int64))

    def gather(self, numbers):
        rows = tf.sqrt(tf.cast(numbers, tf.float32))
        return tf.stack([rows, -rows], axis=1), numbers

    def describe(self, number):
        return f"sample {number}"


def same(one, other):
    for first, second in zip(one, other, strict=True):
        for a, b in zip(tf.nest.flatten(tuple(first)), tf.nest.flatten(tuple(second)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.extended  # starts several services
def test_elements_come_in_their_order_however_many_services_make_them(addresses, count):
    numbers = tf.data.Dataset.range(31)
    made = served(numbers, lambda part: part.map(lambda n: {"n": n, "none": None}), addresses[:count])
    assert [element["n"].numpy() for element in made] == list(range(31))
    assert distributed(numbers, addresses[0]).element_spec == numbers.element_spec


@pytest.mark.parametrize("index", [0, 1])
def test_batches_are_those_that_this_process_would_make(addresses, index):
    place = {"batch": 8, "index": index, "size": 2}
    with_service, without = (ReadOptions(service=service) for service in (addresses, ()))
    for start in (0, 5):
        stream, plain = (
            SourceTraining(Decoded(), seed=3, read_options=options, **place).batches(start)
            for options in (with_service, without)
        )
        same([next(stream) for _ in range(16)], [next(plain) for _ in range(16)])
    same(*(SourceEvaluation(Decoded(), read_options=options, **place) for options in (with_service, without)))


def test_the_maps_of_a_users_dataset_run_there(addresses):
    def stream(service):
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).map(lambda x, y: (x * 2, y)).shuffle(50, seed=2).batch(8)
        options = {"batch": None, "seed": 0, "shuffle": False, "steps_per_epoch": None}
        return training_data(dataset, SingleBackend(None), service=service, **options).batches(0)

    (one, other) = stream(addresses), stream(())
    same([next(one) for _ in range(15)], [next(other) for _ in range(15)])


def test_python_is_refused_by_name(addresses):
    def python(x, y):
        return tf.ensure_shape(tf.numpy_function(lambda t: t, [x], tf.float32), []), y

    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).map(python)
    with pytest.raises(ConfigError, match="runs no Python code of this process"):
        training_data(
            dataset,
            SingleBackend(None),
            batch=5,
            seed=0,
            shuffle=False,
            steps_per_epoch=None,
            service=addresses,
        )
    with pytest.raises(ConfigError, match="runs no Python code of this process"):
        refuse_python(iter(distributed(dataset.batch(5), addresses[0])))
    with pytest.raises(ConfigError, match=r"for a tf\.data\.Dataset"):
        training_data(
            (X, Y), SingleBackend(None), batch=5, seed=0, shuffle=False, steps_per_epoch=None, service=addresses
        )


def test_what_cannot_be_reached_is_named():
    with socket.socket() as silent:
        silent.bind(("localhost", 0))
        port = silent.getsockname()[1]
        with pytest.raises(DataError, match=rf"grpc://localhost:{port}.? cannot be reached within 1 s"):
            processes.check_address(f"grpc://localhost:{port}", timeout=1, answer_timeout=1)
        silent.listen()
        with pytest.raises(DataError, match="no answer within 1 s"):
            processes.check_address(f"grpc://localhost:{port}", timeout=1, answer_timeout=1)


def test_a_service_with_two_workers_is_refused():
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
    address = dispatcher.target.removeprefix("grpc://")
    workers = [service.WorkerServer(service.WorkerConfig(dispatcher_address=address)) for _ in range(2)]
    wait_until(lambda: dispatcher._num_workers() == 2)
    with pytest.raises(DataError, match="Received: 2 workers"):
        processes.check_address(dispatcher.target)
    assert len(workers) == 2


@pytest.mark.parametrize("option", ["here", "grpc://", "grpc://host", "grpc://host:port", "grpc://a:1,b:2"])
def test_addresses_that_are_none_are_refused(option):
    with pytest.raises(ConfigError, match="is local, or grpc://HOST:PORT"):
        addresses_in(option)


def test_several_addresses_may_be_named():
    assert addresses_in("grpc://a:1,grpc://[::1]:2") == ["grpc://a:1", "grpc://[::1]:2"]
    with pytest.raises(ConfigError, match="--data-workers is for"):
        DataConfig(data_workers=2)


def test_a_process_ends_with_the_one_that_started_it_and_its_loss_is_noticed(monkeypatch):
    monkeypatch.setattr(processes, "WATCH_EVERY_S", 0.2)
    words = "subprocess.Popen([sys.executable, '-m', 'hvdtrain.data.service.server'], stdin=subprocess.PIPE)"
    code = f"import subprocess, sys, time; child = {words}; time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    address = parent.stdout.readline().strip()
    assert processes.reachable(address, 5)
    lost = []
    processes.watch([address], lost.append)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: lost)
    assert not processes.reachable(address, 1)
    assert address in str(lost[0])


def test_files_and_parts_of_files_are_read_there(addresses, tmp_path):
    contents = [bytes([65 + number]) * (3 + number) for number in range(6)]
    files = [tmp_path / f"{number}" for number in range(6)]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    (tmp_path / "all").write_bytes(b"head" + b"".join(contents) + b"tail")
    lengths = np.array([len(content) for content in contents])
    offsets = 4 + np.cumsum(lengths) - lengths
    whole = Blobs(files, np.arange(6), np.zeros(6), lengths)
    parts = Blobs([tmp_path / "all"], np.zeros(6), offsets, lengths)
    rows = [[4, 0, 5], [2, 1, 3]]
    for blobs in (whole, parts):
        numbers = tf.data.Dataset.from_tensor_slices(tf.constant(rows, tf.int64))
        read = ReadOptions(service=addresses[:1]).batches(numbers, blobs.tensor, heavy=True)
        assert [piece.numpy().tolist() for piece in read] == [[contents[n] for n in row] for row in rows]
