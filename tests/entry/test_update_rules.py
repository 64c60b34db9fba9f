"""`--zero`, `--local-steps` and `--update` as a user types them: trained, resumed on other ranks, evaluated."""

import json

import pytest

from tests.launching import Job, hvdtrain, launched, summary_of, use_all

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("update_rules")]
SLOWMO = ["--outer-optimizer", "slowmo", "--outer-momentum", "0.5"]
DIGITS = ["digits", "--epochs", "2", "--run-dir"]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The folder of two epochs on two ranks with sharded slots, with sharded parameters and whole; what was printed."""
    folder = tmp_path_factory.mktemp("zero")
    parameters = ["train", *DIGITS, "parameters", "--zero", "3", "--zero-prefetch", "1"]
    trainings = [["train", *DIGITS, "run", "--zero", "1"], parameters, ["train", *DIGITS, "plain"]]
    return folder, use_all("mpirun", 2, trainings, cwd=folder)


@pytest.mark.parametrize(
    ("run", "options", "said"),
    [("run", {"zero": 1}, "zero 1"), ("parameters", {"zero": 3, "zero_prefetch": 1}, "zero 3, zero_prefetch 1")],
)
def test_a_run_with_slices_says_so_and_is_the_plain_run(sharded, run, options, said):
    folder, printed = sharded
    summary = summary_of(folder / run)
    assert printed.count(said) == 1
    assert summary["options"] == options
    plain = summary_of(folder / "plain")
    assert plain["options"] == {}
    for figure in ("train_loss", "val_loss", "val_accuracy"):
        assert summary[figure] == pytest.approx(plain[figure], rel=1e-5)


def test_local_steps_end_with_one_model_on_all_ranks(tmp_path):
    hvdtrain("gloo", 2, *DIGITS, "run", "--local-steps", "4", "--average-slots", *SLOWMO, cwd=tmp_path)
    summary = summary_of(tmp_path / "run")
    assert summary["options"] == {
        "local_steps": 4, "average_slots": True, "outer_optimizer": "slowmo", "outer_momentum": 0.5
    }  # fmt: skip
    assert summary["val_accuracy"] > 0.85  # the ranks' hashes were compared before it was written
    hvdtrain("none", 1, "evaluate", "run", cwd=tmp_path)
    evaluated = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert evaluated["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-5)


def test_an_asynchronous_run_tells_its_staleness_and_goes_on_under_another_rule(tmp_path):
    printed = hvdtrain("mpirun", 2, *DIGITS, "run", "--update", "async", cwd=tmp_path).text
    summary = summary_of(tmp_path / "run")
    assert "staleness, in updates: median " in printed
    assert sum(summary["slices"]) == 2 * summary["steps"]
    assert sum(summary["staleness"].values()) == 2 * 2 * summary["steps"]  # two servers
    assert summary["val_accuracy"] > 0.85
    hvdtrain("gloo", 2, "--resume", "run", "--epochs", "3", "--update", "all_reduce", cwd=tmp_path)
    after = summary_of(tmp_path / "run")
    assert after["epochs"] == 3
    assert "staleness" not in after
    assert after["val_accuracy"] > 0.85


def test_a_rank_that_only_serves_trains_on_nothing(tmp_path):
    hvdtrain("mpirun", 2, *DIGITS, "run", "--update", "async", "--servers", "1", cwd=tmp_path)
    summary = summary_of(tmp_path / "run")
    assert summary["slices"] == [summary["steps"], 0]
    assert summary["val_accuracy"] > 0.85
    hvdtrain("none", 1, "evaluate", "run", cwd=tmp_path)
    evaluated = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert evaluated["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-5)


def test_averages_are_streamed(tmp_path):
    options = ["--local-steps", "8", "--average-fragments", "2", "--average-delay", "2", "--average-bits", "8"]
    hvdtrain("gloo", 2, *DIGITS, "run", *options, cwd=tmp_path)
    assert summary_of(tmp_path / "run")["val_accuracy"] > 0.85
    late = ["--local-steps", "2", "--average-delay", "2"]
    refused = hvdtrain("gloo", 2, *DIGITS, "late", *late, cwd=tmp_path, code=2)
    assert "--average-delay 2 does not go with --local-steps 2: an average must arrive before" in refused.text


def test_a_recorded_order_is_repeated(tmp_path):
    options = [*DIGITS[:-1], "--max-steps", "9", "--update", "async"]
    hvdtrain("mpirun", 2, *options, "--record", "order.json", "--run-dir", "first", cwd=tmp_path)
    servers = json.loads((tmp_path / "order.json").read_text())
    assert [sum(kind == 0 for kind, _ in events) for events in servers] == [18] * 2
    hvdtrain("mpirun", 2, *options, "--replay", "order.json", "--run-dir", "again", cwd=tmp_path)
    first, again = (summary_of(tmp_path / run) for run in ("first", "again"))
    assert first["parameter_hash"] == again["parameter_hash"]


def test_asynchronous_training_needs_mpi(tmp_path):
    refused = hvdtrain("gloo", 2, *DIGITS, "run", "--update", "async", cwd=tmp_path, code=2)
    assert "--update async needs MPI: start with mpirun, or horovodrun --mpi" in refused.text


def test_what_has_no_tables_has_none_on_servers(tmp_path):
    options = ["--update", "hybrid", "--optimizer", "sgd"]
    refused = hvdtrain("mpirun", 2, *DIGITS, "run", *options, cwd=tmp_path, code=2)
    assert "--update hybrid puts tables on servers of which a step touches few rows" in refused.text
    assert "Traceback" not in refused.text


FAILS = """
import hvdtrain
hvdtrain.init()
import keras
import numpy as np
import tensorflow as tf

class Fails(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        tf.debugging.assert_less(tf.cast(self.iterations, "int64"), tf.constant(12, "int64"))
        super().update_step(gradient, variable, learning_rate)

x = np.random.default_rng(0).random((640, 4))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
trainer = hvdtrain.Trainer(model, Fails(0.01), "mse", update="async", servers=1)
trainer.fit(x, x.sum(1), batch=32, epochs=2, log_every=1000, verbose=2)
"""


def test_a_failure_of_a_rank_that_only_serves_ends_the_job_and_is_shown(tmp_path):
    (tmp_path / "train.py").write_text(FAILS)
    job = Job(launched("mpirun", 2, "train.py"), cwd=tmp_path).expect(code=1)
    assert "Condition x < y did not hold" in job.err, job.text[-4000:]
    assert "rank 1" in job.err, job.text[-4000:]
