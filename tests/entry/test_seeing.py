"""What a run shows of itself: logs of each rank and traces, where hosts share no folder."""

import json
import os
import re
import sys
import textwrap

import pytest

from hvdtrain.runtime.tracing.merge import EXCHANGE
from tests.launching import Job, launched

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("seeing")]

DATA = """\
    import numpy as np

    def build(samples=640):
        x = np.random.default_rng(0).random((samples, 4)).astype("float32")
        return (x[64:], x[64:].argmax(axis=1)), (x[:64], x[:64].argmax(axis=1))
"""
MODEL = """\
    import keras

    def build(sample_shape, classes, seed=0):
        inputs = keras.Input(sample_shape)
        return keras.Model(inputs, keras.layers.Dense(4, "softmax", dtype="float32")(inputs))

    build.loss = "sparse_categorical_crossentropy"
"""
IN_OWN_FOLDERS = 'mkdir -p rank-$HOROVOD_RANK && cd rank-$HOROVOD_RANK && exec "$@"'
"""As on hosts that share none."""


def test_each_rank_logs_on_its_host_and_the_primary_has_the_trace(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(DATA))
    (tmp_path / "own.py").write_text(textwrap.dedent(MODEL))
    command = [sys.executable, "-m", "hvdtrain", "train", "--model", "own:build", "--data", "mine:build"]
    words = ["--batch", "64", "--epochs", "1", "--run-dir", "run", "--plots", "False", "--tensorboard", "False"]
    words += ["--timeline", "trace.json", "--profile", "4:6", "--log-every", "100"]
    command = launched("gloo", 2, "-c", IN_OWN_FOLDERS, "sh", *command, *words, program="sh")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = Job(command, cwd=tmp_path, PYTHONPATH=path).expect(timeout=200)
    for rank in (0, 1):
        (log,) = (tmp_path / f"rank-{rank}" / "run" / "logs").iterdir()
        text = log.read_text()
        assert log.name == f"rank-{rank}.log"
        assert re.match(rf"---- .* rank {rank} of 2 on \S+, after step 0\n", text)
        assert ("INFO epoch 1/1" in text) == (rank == 0)
    assert [path.name for path in (tmp_path / "rank-1" / "run").iterdir()] == ["logs"]
    assert "epoch 1/1" in done.out
    assert len(re.findall(r"rank [01] \(\S+\): \S+ ms of exchange a step, \d+% of it while Tensor", done.err)) == 2
    trace = rows_of(tmp_path / "rank-0" / "trace.json")
    assert not (tmp_path / "rank-1" / "trace.json").exists()
    assert not list(tmp_path.glob("rank-*/*.parts"))
    ranks = sorted({process for process, _ in trace if process.startswith("rank ")})
    assert [name[:7] for name in ranks] == ["rank 0 ", "rank 1 "]
    for name in ranks:
        check_exchange_within_steps(trace, name, range(1, 10))
        operations = [row for process, row in trace if process == name and row.startswith("TensorFlow: ")]
        assert operations
        begin, end = span(trace, name, 4)[0], span(trace, name, 6)[1]
        for row in operations:
            assert all(begin - 2e4 < event["ts"] < end + 2e4 for event in trace[name, row])


SCRIPT = """\
    import hvdtrain
    hvdtrain.init(timeline="trace.json", profile=(3, 3), profile_ranks=(1,))
    import keras, tensorflow as tf

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step(x):
        with hvdtrain.DistributedGradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    for number in range(1, 7):
        with hvdtrain.trace_step(number):
            float(step(tf.ones((8, 4))))
"""


def test_a_loop_of_its_own_is_traced_under_mpi(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    done = Job(launched("mpirun", 2, "train.py"), cwd=tmp_path).expect(timeout=200)
    assert "the trace of all ranks is in trace.json: open it at https://ui.perfetto.dev" in done.err
    trace = rows_of(tmp_path / "trace.json")
    ranks = sorted({process for process, _ in trace if process.startswith("rank ")})
    assert len(ranks) == 2
    for name in ranks:
        check_exchange_within_steps(trace, name, range(1, 7))
    profiled = {process for process, row in trace if row.startswith("TensorFlow: ")}
    assert profiled == {ranks[1]}


def span(trace, process, number):
    """When a step of a rank began and ended."""
    names = (f"step {number}", f"step {number} (compiles)")
    (found,) = [event for event in trace[process, "training"] if event["name"] in names]
    return found["ts"], found["ts"] + found["dur"]


def check_exchange_within_steps(trace, process, steps):
    """Each step holds an exchange of gradients, to its end: that of rank 0, or of the step."""
    exchanges = [event for event in trace[process, EXCHANGE] if event["name"] == "ALLREDUCE"]
    for number in steps:
        begin, end = span(trace, process, number)
        # Of times in us since 1970 a float holds quarters.
        within = [event for event in exchanges if begin - 1 <= event["ts"] and event["ts"] + event["dur"] <= end + 1]
        assert within, (number, begin, end, exchanges)


def rows_of(file):
    """Events of a trace by process and row."""
    found, names = {}, {}
    for event in json.loads(file.read_text())["traceEvents"]:
        if event["ph"] == "M":
            if event["name"] in ("process_name", "thread_name"):
                names[event["pid"], event.get("tid")] = event["args"]["name"]
        else:
            row = names[event["pid"], None], names[event["pid"], event["tid"]]
            found.setdefault(row, []).append(event)
    return found
