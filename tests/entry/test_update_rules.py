"""`--zero 1` and `--local-steps` as a user types them: trained, resumed on other numbers of ranks, evaluated."""

import json
import shutil

import pytest

from tests.launching import hvdtrain

pytestmark = pytest.mark.xdist_group("update_rules")
DIGITS = ["digits", "--epochs", "2", "--run-dir"]


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Two epochs on two ranks with sharded slots."""
    folder = tmp_path_factory.mktemp("zero")
    job = hvdtrain("mpirun", 2, *DIGITS, "run", "--zero", "1", cwd=folder)
    assert job.code == 0, job.text[-4000:]
    return folder, job


def test_a_run_with_sharded_slots_says_so_and_is_the_plain_run(sharded, tmp_path):
    folder, job = sharded
    summary = summary_of(folder / "run")
    assert "zero 1" in job.text
    assert summary["options"] == {"zero": 1}
    assert hvdtrain("mpirun", 2, *DIGITS, "plain", cwd=tmp_path).code == 0
    plain = summary_of(tmp_path / "plain")
    assert plain["options"] == {}
    for figure in ("train_loss", "val_loss", "val_accuracy"):
        assert summary[figure] == pytest.approx(plain[figure], rel=1e-5)


def test_a_checkpoint_holds_the_slices_of_all_ranks(sharded):
    folder, _ = sharded
    newest = sorted((folder / "run" / "checkpoints").iterdir())[-1]
    manifest = json.loads((newest / "manifest.json").read_text())
    text = json.dumps(manifest)
    assert text.count("optimizer/velocities/") >= 2
    assert len({path.name for path in newest.iterdir()} - {"manifest.json"}) >= 2, "one file for each rank"


@pytest.mark.parametrize(("controller", "size"), [("none", 1), ("gloo", 4)])
def test_any_number_of_ranks_goes_on_with_the_slices(sharded, tmp_path, controller, size):
    folder, _ = sharded
    shutil.copytree(folder / "run", tmp_path / "run")
    job = hvdtrain(controller, size, "--resume", "run", "--epochs", "3", cwd=tmp_path)
    assert job.code == 0, job.text[-4000:]
    summary = summary_of(tmp_path / "run")
    assert (summary["epochs"], summary["resumed_from"], summary["world_size"]) == (3, 46, size)
    assert summary["val_accuracy"] > summary_of(folder / "run")["val_accuracy"] - 0.02


def test_local_steps_end_with_one_model_on_all_ranks(tmp_path):
    job = hvdtrain("gloo", 2, *DIGITS, "run", "--local-steps", "4", "--average-slots", cwd=tmp_path)
    assert job.code == 0, job.text[-4000:]
    summary = summary_of(tmp_path / "run")
    assert summary["options"] == {"local_steps": 4, "average_slots": True}
    assert summary["val_accuracy"] > 0.85  # the ranks' hashes were compared before it was written
    again = hvdtrain("none", 1, "evaluate", "run", cwd=tmp_path)
    assert again.code == 0, again.text[-4000:]
    evaluated = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert evaluated["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-5)


def test_what_does_not_go_together_is_said_in_one_line(tmp_path):
    job = hvdtrain("none", 1, "digits", "--zero", "1", "--local-steps", "2", cwd=tmp_path)
    assert job.code == 2
    said = " ".join(job.err.split())  # the command line wraps it
    assert "--zero needs every rank's gradients in each step: leave out --zero or --local-steps." in said
