"""`--parallel cp=2` and `hvdtrain.parallelize` without rules, as a user types them."""

import json
import sys

import pytest

from tests.entry.docs.pages import blocks_of
from tests.launching import hvdtrain, launcher, run

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("context_parallel")]
SMALL = ["--max-steps", "4", "--batch", "8", "--model-args", "depth", "1", "width", "32"]


def test_a_recipe_trains_on_slices_of_its_sequences_as_in_one_process(tmp_path):
    words = ["gpt_char", *SMALL, "heads", "4", "dropout", "0.0", "--run-dir"]
    figures = []
    for processes, more in ((2, ["cut", "--parallel", "cp=2"]), (1, ["whole"])):
        job = hvdtrain("gloo" if processes == 2 else "none", processes, *words, *more, cwd=tmp_path)
        assert job.code == 0, job.text[-4000:]
        figures.append(json.loads((tmp_path / more[0] / "summary.json").read_text()))
    cut, whole = figures
    assert cut["mesh"] == {"cp": 2}
    assert cut["global_batch"] == cut["per_replica_batch"] == 8
    assert cut["parameters"] == whole["parameters"]
    for figure in ("train_loss", "val_loss", "val_accuracy"):
        assert cut[figure] == pytest.approx(whole[figure], rel=1e-4)
    assert (tmp_path / "cut" / "model.keras").exists()  # no rank has a part of it
    alone = hvdtrain("none", 1, "evaluate", "cut", cwd=tmp_path)
    assert f"val_loss {cut['val_loss']:.4f}" in alone.out, alone.text


EXPERTS = ["experts", "4", "every", "1", "capacity_factor", "0", "--data-args", "length", "64"]


@pytest.mark.parametrize(
    ("recipe", "axes", "more"),
    [
        ("gpt_char", {"cp": 2, "pp": 2}, ["heads", "4", "dropout", "0.0", "--accumulate", "2"]),
        ("moe_char", {"cp": 2, "ep": 2}, ["heads", "2", *EXPERTS]),
    ],
    ids=["stages", "experts"],
)
def test_slices_go_with_stages_and_experts(tmp_path, recipe, axes, more):
    named = ",".join(f"{axis}={size}" for axis, size in axes.items())
    figures = []
    for name, processes, split in (("split", 4, ["--parallel", named]), ("whole", 1, [])):
        launcher_name = "none" if processes == 1 else "mpirun"
        job = hvdtrain(launcher_name, processes, recipe, *SMALL, *more, "--run-dir", name, *split, cwd=tmp_path)
        assert job.code == 0, job.text[-4000:]
        figures.append(json.loads((tmp_path / name / "summary.json").read_text()))
    mine, alone = figures
    assert mine["mesh"] == axes
    for figure in ("train_loss", "val_loss", "val_accuracy"):
        assert mine[figure] == pytest.approx(alone[figure], rel=1e-4)


MISTAKES = """
def refused(build, said):
    try:
        hvdtrain.parallelize(build)
        raise SystemExit("went unnoticed: " + said)
    except ValueError as error:
        assert said in str(error), error

def smoothed():
    tokens = keras.Input((64,), dtype="int32")
    return keras.Model(tokens, keras.layers.Conv1D(4, 3, padding="same")(keras.layers.Embedding(9, 4)(tokens)))

refused(smoothed, "looks at several positions")
width = 8 * (1 + hvdtrain.rank())
refused(lambda: keras.Sequential([keras.Input((64,)), keras.layers.Embedding(9, width)]), "Received: ")
samples = tokens[hvdtrain.rank() :: 2]
try:
    trainer.fit((samples[:, :-1], samples[:, 1:]), batch=32, epochs=1)
    raise SystemExit("other samples on each rank went unnoticed")
except Exception as error:
    assert "rank 1" in str(error), error
"""


def test_the_script_of_the_documentation_trains_and_mistakes_are_named(tmp_path):
    script = blocks_of("docs/context_parallel.md", "python")[0].text
    (tmp_path / "script.py").write_text(script + MISTAKES)
    job = run([*launcher("mpirun", 2), sys.executable, "script.py"], cwd=tmp_path, timeout=150)
    assert job.code == 0, job.text[-4000:]
    assert job.out.count("(4, 64, 100)") == 2
    assert "cp 2" in job.out
