"""`--backend` as a user types it: the same recipe trains to the same loss on every one."""

import json

import pytest

from tests.launching import Job, hvdtrain, launched, summary_of

pytestmark = pytest.mark.xdist_group("backends")  # one process makes the run that the others are held against
STEPS = "20"


def trained(controller, size, *words, cwd):
    job = hvdtrain(controller, size, *words, cwd=cwd)
    return job, summary_of(cwd / "run")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    words = ("digits", "--backend", "single", "--max-steps", STEPS, "--run-dir", "run")
    return trained("none", 1, *words, cwd=tmp_path_factory.mktemp("single"))[1]


def assert_same(summary, reference):
    assert summary["steps"] == reference["steps"] == int(STEPS)
    assert summary["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-5)
    assert summary["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-5)
    assert summary["val_accuracy"] == reference["val_accuracy"]


# Half a minute: four replicas take turns in one process, in two starts, beside one replica that trains the same.
def test_replicas_of_one_process_go_on_where_they_were(tmp_path, reference):
    words = ("--checkpoint-every", "8", "--run-dir", "run")
    job, first = trained(
        "none", 1, "digits", "--backend", "mirrored", "--replicas", "4", "--max-steps", "8", *words, cwd=tmp_path
    )
    assert "backend     mirrored, 4 replicas" in job.out
    assert "batch       64 samples, 16 per replica" in job.out
    assert (first["backend"], first["world_size"]) == ("mirrored", 4)
    # Another backend, with another number of replicas, goes on with what one has saved.
    _, summary = trained(
        "none", 1, "--resume", "run", "--backend", "central_storage", "--replicas", "2", "--max-steps", STEPS,
        cwd=tmp_path,
    )  # fmt: skip
    assert (summary["backend"], summary["world_size"], summary["resumed_from"]) == ("central_storage", 2, 8)
    assert summary["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-5)


@pytest.mark.extended
def test_workers_find_one_another_under_any_launcher(tmp_path, reference):
    words = ("digits", "--backend", "multi_worker_mirrored", "--communication", "ring", "--max-steps", STEPS)
    job, summary = trained("gloo", 2, *words, "--run-dir", "run", cwd=tmp_path)
    assert "backend     multi_worker_mirrored (ring), 2 ranks by horovodrun" in job.out
    assert (summary["backend"], summary["world_size"]) == ("multi_worker_mirrored", 2)
    assert_same(summary, reference)


@pytest.mark.extended
def test_workers_train_digits_on_a_parameter_server(tmp_path):
    words = ("digits", "--backend", "parameter_server", "--epochs", "10", "--run-dir", "run")
    job, summary = trained("mpirun", 4, *words, cwd=tmp_path)
    said = "backend     parameter_server, 4 ranks by mpirun (1 chief, 2 workers, 1 parameter server), 1 thread each"
    assert job.out.count(said) == 1, job.out
    assert "batch       64 samples, each by one worker" in job.out
    assert "rror" not in job.text, job.text[-4000:]
    assert summary["val_accuracy"] >= 0.97
    assert (summary["backend"], summary["world_size"], summary["steps"]) == ("parameter_server", 4, 230)
    assert summary["roles"] == {"chief": 1, "worker": 2, "parameter server": 1}
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "env.json", "metrics.jsonl", "summary.json", "checkpoints", "tensorboard", "model.keras",
        "curves.png", "preprocessing.json", "logs",
    }  # fmt: skip
    # One process evaluates what the servers held, and goes on with it.
    hvdtrain("none", 1, "evaluate", "run", cwd=tmp_path)
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["val_accuracy"] == summary["val_accuracy"]
    assert evaluation["parameter_hash"] == summary["parameter_hash"]


@pytest.mark.extended
def test_a_worker_that_is_killed_ends_the_job(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    job = Job(launched("gloo", 3, "killed.py"), cwd=tmp_path).expect("trains", code=None)
    assert job.code != 0


KILLED = """\
import os, signal, threading
from hvdtrain.runtime.launchers import detect_environment
if detect_environment().rank == 1:
    import pathlib, time
    def end():
        while not pathlib.Path("begun").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=end, daemon=True).start()
import hvdtrain
hvdtrain.init(backend="parameter_server")
import keras, numpy as np, pathlib
def build():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
trainer = hvdtrain.Trainer(build, "sgd", "mse")
data = np.zeros((64, 2), "float32"), np.zeros((64, 1), "float32")
trainer.fit(data, batch=8, verbose=False)
print("trains", flush=True)
pathlib.Path("begun").touch()
trainer.fit(data, batch=8, epochs=100000, verbose=False)
"""
