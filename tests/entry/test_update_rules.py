"""`--zero` and `--local-steps` as a user types them: trained, resumed on other numbers of ranks, evaluated."""

import json

import pytest

from tests.launching import hvdtrain, summary_of, use_all

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
