"""Runs in real stores of MLflow and Weights & Biases, by the command line and by `fit`, on ranks and after a resume."""

import json
import struct
from pathlib import Path

import pytest

from tests.launching import Job, hvdtrain, launched, summary_of

BLOCK = 32768
QUIET = ("--plots", "False", "--tensorboard", "False")
SCRIPT = """
import sys
import keras
import numpy as np
import hvdtrain

hvdtrain.init()
images, labels = np.random.default_rng(0).random((48, 4), "float32"), np.arange(48) % 3
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
trackers = [hvdtrain.MlflowTracker({"note": "mine"}, experiment="scripts"), hvdtrain.WandbTracker(project="scripts")]
trainer = hvdtrain.Trainer(model, "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
trainer.resume("saved")
trainer.fit(
    images, labels, batch=12, epochs=int(sys.argv[1]), callbacks=trackers, checkpoint="saved",
    validation_data=(images, labels), log_every=2, verbose=0,
)
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    for package in ("mlflow", "wandb"):
        pytest.importorskip(package, reason=f"{package} is not installed: see launch/lib/overlay.sh")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mlflow_runs(experiment="Default"):
    import mlflow

    client = mlflow.MlflowClient()
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, found


def wandb_records(folder):
    """Return the records of each offline folder by its run, in the order in which they were written."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(Path(folder).glob("offline-run-*/run-*.wandb"))
    return [(file.stem.removeprefix("run-"), [*map(Record.FromString, _payloads(file.read_bytes()))]) for file in files]


def _payloads(data):
    """Yield what a log in LevelDB's format holds: blocks of parts, each after checksum, length and kind."""
    place, payload = 7, b""  # behind W&B's own header
    while len(data) - place >= 7:
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if not kind:
            break
        payload += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield payload
            payload = b""


def history(records):
    rows = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


def test_mlflow_has_one_run_of_a_training_on_ranks_that_is_resumed_on_others(home):
    hvdtrain("mpirun", 2, "digits", "--max-steps", "30", "--tracker", "mlflow", "--run-dir", "a", *QUIET, cwd=home)
    hvdtrain("gloo", 3, "--resume", "a", "--max-steps", "46", "--batch", "64", cwd=home, code=2)  # no batch of 3 ranks
    hvdtrain("none", 1, "--resume", "a", "--max-steps", "46", cwd=home)
    client, (found,) = mlflow_runs()
    assert (found.info.run_name, found.info.status) == ("a", "FINISHED")
    assert (found.data.params["world_size"], found.data.params["training.max_steps"]) == ("2", "30")
    assert (found.data.tags["resumed.world_size"], found.data.tags["resumed.training.max_steps"]) == ("1", "46")
    assert found.data.tags["parameter_hash"] == summary_of(home / "a")["parameter_hash"]
    losses = client.get_metric_history(found.info.run_id, "val_loss")
    assert [each.step for each in losses] == [23, 30, 46]
    assert losses[-1].value == pytest.approx(summary_of(home / "a")["val_loss"])
    # Another training is another run.
    hvdtrain("none", 1, "digits", "--max-steps", "2", "--tracker", "mlflow", "--run-dir", "b", *QUIET, cwd=home)
    assert sorted(each.info.run_name for each in mlflow_runs()[1]) == ["a", "b"]


def test_wandb_has_one_run_of_a_training_on_ranks_that_is_resumed(home):
    words = ("--tracker", "wandb", "--run-dir", "a", *QUIET)
    hvdtrain("mpirun", 2, "digits", "--max-steps", "30", *words, cwd=home)
    hvdtrain("mpirun", 2, "--resume", "a", "--max-steps", "46", cwd=home)
    (first, before), (second, after) = wandb_records("wandb")
    assert first == second
    rows = [*history(before), *history(after)]
    assert [(row["step"], row["epoch"]) for row in rows if "val_loss" in row] == [(23, 1), (30, 2), (46, 2)]
    assert rows[-1]["val_loss"] == pytest.approx(summary_of(home / "a")["val_loss"])
    assert [row["step"] for row in rows if "train/loss" in row][:3] == [1, 10, 20]
    ends = [record.exit.exit_code for record in [*before, *after] if record.WhichOneof("record_type") == "exit"]
    assert ends == [0, 0]


def test_fit_writes_to_both_and_goes_on_with_both(home):
    (home / "script.py").write_text(SCRIPT)
    for epochs in (1, 2):
        Job(launched("gloo", 2, "script.py", str(epochs)), cwd=home).expect(timeout=300)
    client, (found,) = mlflow_runs("scripts")
    assert found.data.params["note"] == "mine"
    assert [each.step for each in client.get_metric_history(found.info.run_id, "loss")] == [4, 8]
    (first, before), (second, after) = wandb_records("wandb")
    assert first == second
    assert [row["step"] for row in [*history(before), *history(after)] if "val_loss" in row] == [4, 8]


@pytest.mark.parametrize(
    ("tracker", "environ", "said"),
    [
        ("mlflow", {"MLFLOW_TRACKING_URI": "nowhere://x"}, "MLflow cannot begin a run: "),
        (
            "mlflow",
            {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"},
            "MLflow cannot",
        ),
        ("wandb", {"WANDB_MODE": "online", "WANDB_API_KEY": ""}, "Weights & Biases cannot begin a run: "),
    ],
)
def test_a_tracker_that_cannot_be_reached_is_one_line_before_the_first_step(home, tracker, environ, said):
    words = ("digits", "--tracker", tracker, "--run-dir", "new", *QUIET)
    job = hvdtrain("mpirun", 2, *words, cwd=home, code=None, **environ)
    assert job.code, job.text
    assert said in job.err
    assert "step  1/" not in job.out
