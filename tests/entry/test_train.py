"""`python -m hvdtrain` as a user types it, under every launcher, in a fresh folder."""

import json
import re
import sys

import pytest
import yaml

from hvdtrain.checkpoint.selection import find_checkpoint
from tests.entry.docs.pages import blocks_of
from tests.launching import Job, hvdtrain, summary_of

pytestmark = pytest.mark.xdist_group("runs")  # one process makes the runs that these tests look at
SUMMARY_KEYS = {
    "recipe", "backend", "world_size", "launcher", "steps", "epochs", "train_loss", "val_loss", "val_accuracy",
    "samples_per_second", "step_ms", "wall_seconds", "parameters", "parameter_hash",
}  # fmt: skip
FILES = {
    "config.yaml", "env.json", "preprocessing.json", "metrics.jsonl", "summary.json", "checkpoints", "tensorboard",
    "model.keras", "curves.png", "logs"
}  # fmt: skip
WORLDS = [
    ("none", 1),
    ("gloo", 2),
    ("mpirun", 2),
    ("horovodrun", 2),
    pytest.param("gloo", 1, marks=pytest.mark.extended),
    pytest.param("mpirun", 4, marks=pytest.mark.extended),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two epochs of digits for each launcher and number of ranks, each run once, when a test first asks for it.

    With averages of the weights, which a resumed run must not take for the weights.
    """
    done = {}

    def run_of(controller, size):
        if (controller, size) not in done:
            folder = tmp_path_factory.mktemp(f"{controller}-{size}")
            where = [] if controller == "horovodrun" else ["--run-dir", "run"]
            job = hvdtrain(controller, size, "digits", "--epochs", "2", "--ema", "0.9", *where, cwd=folder)
            (made,) = folder.glob("run" if where else "runs/*")
            done[controller, size] = job, made
        return done[controller, size]

    return run_of


@pytest.mark.parametrize(("controller", "size"), WORLDS)
def test_a_run_leaves_its_folder_and_its_figures(runs, controller, size):
    _, folder = runs(controller, size)
    assert {path.name for path in folder.iterdir()} == FILES
    summary = summary_of(folder)
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["world_size"], summary["steps"], summary["epochs"]) == (size, 46, 2)
    assert summary["backend"] == ("single" if controller == "none" else "horovod")
    assert re.fullmatch(r"[0-9a-f]{64}", summary["parameter_hash"])
    assert summary["step_ms"]["p90"] >= summary["step_ms"]["median"] > 0


@pytest.mark.parametrize(("controller", "size"), WORLDS[1:])
def test_every_world_trains_the_same_model(runs, controller, size):
    reference, here = summary_of(runs("none", 1)[1]), summary_of(runs(controller, size)[1])
    assert here["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-3)
    assert here["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-3)
    assert abs(here["val_accuracy"] - reference["val_accuracy"]) <= 1 / 360 + 1e-9


def test_metrics_hold_steps_and_evaluations(runs):
    _, folder = runs("mpirun", 2)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [1, 10, 20, 23, 30, 40, 46]
    assert all(record[key] is not None for record in steps for key in ("loss", "learning_rate", "grad_norm"))
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert [record["step"] for record in evaluations] == [23, 46]
    assert evaluations[-1]["loss"] == summary_of(folder)["val_loss"]
    epochs = [record for record in records if record["kind"] == "epoch"]
    assert epochs[-1]["val_loss"] == evaluations[-1]["loss"]
    assert epochs[-1]["loss"] == summary_of(folder)["train_loss"]


def test_a_log_gets_plain_lines_from_the_first_rank_only(runs):
    job, _ = runs("mpirun", 2)
    assert "\x1b" not in job.out
    assert job.out.count("batch       64 samples, 32 per rank") == 1
    last_epoch = r"epoch 2/2  loss \d\.\d{4}  accuracy \d\.\d{4}  val_loss \d\.\d{4}  val_accuracy \d\.\d{4}"
    assert len(re.findall(last_epoch, job.out)) == 1
    assert "Error" not in job.text
    assert "rror" not in runs("none", 1)[0].text


def shapes_of(output):
    """The lines of a run's output without horovodrun's tags, the launcher's choice and all numbers."""
    lines = [re.sub(r"^\[[\d,]+\]<std(?:out|err)>:", "", line).strip() for line in output.splitlines()]
    lines = [re.sub(r"\((?:mpi|gloo)\)", "(mpi)", line) for line in lines if line]
    return {re.sub(r"\s+", " ", re.sub(r"\d[\d.,:-]*", "0", line)) for line in lines}


def test_the_readme_shows_what_a_run_prints(runs):
    (example,) = (block for block in blocks_of("README.md", "") if "run folder" in block.text)
    assert shapes_of(example.text) - {"..."} <= shapes_of(runs("horovodrun", 2)[0].out)


@pytest.mark.parametrize("size", [1, pytest.param(4, marks=pytest.mark.extended)])
def test_evaluate_says_what_training_said(runs, size):
    _, folder = runs("mpirun", 2)
    controller = "none" if size == 1 else "gloo"
    job = hvdtrain(controller, size, "evaluate", "run", cwd=folder.parent)
    summary, evaluation = summary_of(folder), json.loads((folder / "evaluation.json").read_text())
    assert evaluation["val_accuracy"] == summary["val_accuracy"]
    assert evaluation["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-6)
    assert evaluation["parameter_hash"] == summary["parameter_hash"]
    assert f"val_accuracy {summary['val_accuracy']:.4f}" in job.out
    (folder / "evaluation.json").unlink()


@pytest.mark.extended
def test_its_own_config_reproduces_a_run(runs, tmp_path):
    _, folder = runs("none", 1)
    declared = yaml.safe_load((folder / "config.yaml").read_text())
    assert declared["training"]["epochs"] == 2
    hvdtrain("none", 1, "--config", str(folder / "config.yaml"), "--run-dir", "again", cwd=tmp_path)
    assert summary_of(tmp_path / "again")["parameter_hash"] == summary_of(folder)["parameter_hash"]


def test_the_saved_model_is_the_trained_one(runs):
    import keras
    import numpy as np

    from hvdtrain.data.digits import load

    _, folder = runs("mpirun", 2)
    loading = "import keras, sys; keras.models.load_model('model.keras'); assert 'hvdtrain' not in sys.modules"
    Job([sys.executable, "-c", loading], cwd=folder).expect()
    model = keras.models.load_model(folder / "model.keras")
    validation = load().validation
    images, labels = (part.numpy() for part in validation.gather(np.arange(validation.size)))
    accuracy = float(np.mean(model.predict(images, verbose=0).argmax(1) == labels))
    assert accuracy == pytest.approx(summary_of(folder)["val_accuracy"], abs=1e-6)


def test_the_best_epoch_is_kept_as_well(runs):
    _, folder = runs("mpirun", 2)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    losses = {each["step"]: each["loss"] for each in map(json.loads, lines) if each["kind"] == "evaluation"}
    best = min(losses, key=losses.get)
    assert find_checkpoint(folder / "checkpoints", "best").name == f"step-{best:08d}"
    expected = {"metric": "val_loss", "mode": "min", "value": pytest.approx(losses[best]), "step": best}
    assert summary_of(folder)["best"] == expected


# Half a minute: two launches of two ranks.
def test_a_resumed_run_ends_like_one_at_a_stretch(runs, tmp_path):
    _, folder = runs("mpirun", 2)
    words = ("digits", "--epochs", "2", "--max-steps", "30", "--checkpoint-every", "10", "--run-dir", "run")
    words += ("--keep-best", "none", "--ema", "0.9")
    hvdtrain("mpirun", 2, *words, cwd=tmp_path)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000010", "step-00000020", "step-00000030"]
    # The disk was full, or the job was killed, while the newest was written: the one before it counts.
    (tmp_path / "run" / "checkpoints" / "step-00000030" / "index.json").unlink()
    hvdtrain("mpirun", 2, "--resume", "run", "--max-steps", "46", cwd=tmp_path)
    summary = summary_of(tmp_path / "run")
    assert (summary["resumed_from"], summary["steps"]) == (20, 46)
    assert summary["parameter_hash"] == summary_of(folder)["parameter_hash"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if record["kind"] == "step"]
    assert steps == sorted(set(steps)), "steps that were taken twice stand twice"


@pytest.mark.extended
def test_without_horovod_one_process_trains_and_two_say_what_is_missing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['horovod'] = None  # as if it were not there\n")
    hvdtrain("none", 1, "--epochs", "1", "--run-dir", "a", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert summary_of(tmp_path / "a")["backend"] == "single"
    two = hvdtrain("mpirun", 2, "--epochs", "1", "--run-dir", "b", cwd=tmp_path, PYTHONPATH=str(tmp_path), code=None)
    assert two.code != 0
    assert two.err.count("Horovod is not installed") == 1
    assert "python -m hvdtrain setup" in two.err
