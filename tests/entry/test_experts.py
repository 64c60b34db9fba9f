"""Mixture of experts from the command line: each rank along ep holds some of them."""

import json
import sys

import keras
import pytest

from hvdtrain import MixtureOfExperts, load_run
from hvdtrain.config.errors import CheckpointError
from hvdtrain.state.hashes import digest_of
from hvdtrain.state.structure import structure_of
from tests.launching import Job, hvdtrain, summary_of

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("experts")]  # they share a reference

SMALL = "--batch 8 --warmup-steps 0 --model-args depth 1 heads 2 experts 4 every 1 width {width} capacity_factor"
RUN = "--data-args length 64 --max-steps 4 --log-every 2 --plots False --tensorboard False --run-dir"
CHOICES = 2 * 8 * 64
"""Of a step: two experts for each token."""


def train(folder, controller, size, name, capacity, *more, width=16):
    words = [*SMALL.format(width=width).split(), capacity, *RUN.split(), name, *more]
    hvdtrain(controller, size, "moe_char", *words, cwd=folder)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    summary = summary_of(folder / name)
    return summary, [line for line in lines if line["kind"] == "step"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """What one process trains with experts that ZeRO would divide: smaller variables stay whole."""
    return train(tmp_path_factory.mktemp("wide"), "none", 1, "one", "0", width=128)[0]


def test_two_ranks_with_two_experts_each_train_as_one_process_with_four(tmp_path):
    one, steps = train(tmp_path, "none", 1, "one", "0")
    two, steps_of_two = train(tmp_path, "mpirun", 2, "two", "0", "--parallel", "ep=2")
    assert two["parameters"] == one["parameters"]
    script = "import hvdtrain; print(hvdtrain.load_run('one').model.count_params())"
    loaded = Job([sys.executable, "-c", script], cwd=tmp_path).expect()  # knows no layer of ours yet
    assert loaded.out.split() == [str(one["parameters"])], loaded.text
    with pytest.raises(CheckpointError, match=r"held parts of the model.*checkpoint export .*two --to .*model\.keras"):
        load_run(tmp_path / "two")
    for figure in ("train_loss", "val_loss", "val_accuracy"):
        assert two[figure] == pytest.approx(one[figure], rel=1e-5)
    assert [step["step"] for step in steps] == [step["step"] for step in steps_of_two] == [1, 2, 4]
    for mine, theirs in zip(steps, steps_of_two, strict=True):
        assert mine["dropped_tokens"] == theirs["dropped_tokens"] == 0
        assert sum(mine["expert_load_block0_experts"]) == pytest.approx(4, rel=1e-5)
        assert theirs["expert_load_block0_experts"] == pytest.approx(mine["expert_load_block0_experts"], abs=0.02)


def test_dropped_tokens_are_logged(tmp_path):
    _, steps = train(tmp_path, "none", 1, "one", "0.5")
    for step, count in zip(steps, (1, 1, 2), strict=True):
        load = [share * CHOICES / 4 for share in step["expert_load_block0_experts"]]
        least = sum(max(0, tokens - CHOICES / 8) for tokens in load)  # of a capacity that every step has anew
        assert least - 1e-3 <= step["dropped_tokens"] / count < CHOICES
        assert step["dropped_share"] == pytest.approx(step["dropped_tokens"] / (count * CHOICES), rel=1e-5)


@pytest.mark.parametrize("words", ["--parallel dp=2,ep=2 --zero 3", "--parallel pp=2,ep=2 --recompute"])
def test_four_ranks_train_save_and_export_what_one_process_does(tmp_path, wide, words):
    four, _ = train(tmp_path, "gloo", 4, "four", "0", *words.split(), width=128)
    assert four["parameters"] == wide["parameters"]
    for figure in ("train_loss", "val_loss", "val_accuracy"):
        assert four[figure] == pytest.approx(wide[figure], rel=1e-5), figure
    exported = hvdtrain("none", 1, "checkpoint", "export", "four", "--to", "whole.keras", cwd=tmp_path)
    assert "from hvdtrain import MixtureOfExperts" in exported.out
    assert issubclass(MixtureOfExperts, keras.Layer), "imported, as the command says"
    model = keras.models.load_model(tmp_path / "whole.keras", compile=False)
    weights = structure_of(model).by_path(model.weights)
    found = digest_of({f"model/{path}": variable.numpy() for path, variable in weights.items()})
    assert found == four["parameter_hash"]
