"""One run that goes on in one layout after another: the whole model stays the same, bit by bit."""

import keras
import pytest

from hvdtrain.state.hashes import digest_of
from hvdtrain.state.structure import structure_of
from tests.launching import hvdtrain, summary_of

pytestmark = [pytest.mark.xdist_group("resharding"), pytest.mark.extended]
SIZES = ["--model-args", "depth", "1", "width", "80", "heads", "4", "dropout", "0.0"]
STEP = ["--schedule", "step", "--decay-at", "0.2", "--decay-factor", "1e-30", "--final-rate", "0"]
RATE = [*STEP, "--warmup-steps", "0"]
"""After three of eighteen steps too small to change a bit of a weight: a layout saves what it has restored."""
LAYOUTS = [("mpirun", 2, ["--parallel", "pp=2"]), ("none", 1, ["--parallel", "dp=-1"]), ("gloo", 2, ["--zero", "3"])]


def test_a_run_goes_on_in_every_layout_and_ends_as_a_whole_model(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    text = ["--data-args", "path", "text.txt", "length", "16", "--batch", "8", "--plots", "False"]
    words = [
        "gpt_char",
        *text,
        *RATE,
        *SIZES,
        "--epochs",
        "1",
        "--accumulate",
        "2",
        "--parallel",
        "tp=2",
        "--run-dir",
        "run",
    ]
    before = summary_after(tmp_path, "mpirun", 2, *words, "--max-steps", "4")
    assert before["mesh"] == {"tp": 2}
    for number, (controller, size, layout) in enumerate(LAYOUTS, 1):
        steps = str(4 + 2 * number)
        after = summary_after(tmp_path, controller, size, "--resume", "run", "--max-steps", steps, *layout)
        assert after["resumed_from"] == before["steps"]
        assert after["parameter_hash"] == before["parameter_hash"], layout
        assert after["parameters"] == before["parameters"]
        assert after["val_loss"] == pytest.approx(before["val_loss"], rel=1e-5), layout
        before = after
    hvdtrain("none", 1, "checkpoint", "export", "run", "--to", "whole.keras", cwd=tmp_path)
    model = keras.models.load_model(tmp_path / "whole.keras", compile=False)
    assert hash_of(model) == before["parameter_hash"]
    kernel = model.get_layer("block0_mlp_in").kernel
    kernel.assign(kernel * (1 + 1e-6))
    assert hash_of(model) != before["parameter_hash"]


def summary_after(folder, controller, size, *words):
    hvdtrain(controller, size, *words, cwd=folder)
    return summary_of(folder / "run")


def hash_of(model):
    weights = structure_of(model).by_path(model.weights)
    return digest_of({f"model/{path}": variable.numpy() for path, variable in weights.items()})
