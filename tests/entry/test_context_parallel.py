"""`--parallel cp=2` and `hvdtrain.parallelize` without rules, as a user types them."""

import pytest

from tests.entry.docs.pages import blocks_of
from tests.launching import Job, hvdtrain, launched, summary_of

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("context_parallel")]
SMALL = ["--max-steps", "4", "--batch", "8", "--model-args", "depth", "1", "width", "32"]


def test_a_recipe_trains_on_slices_of_its_sequences_as_in_one_process(tmp_path):
    words = ["gpt_char", *SMALL, "heads", "4", "dropout", "0.0", "--run-dir"]
    figures = []
    for processes, more in ((2, ["cut", "--parallel", "cp=2"]), (1, ["whole"])):
        hvdtrain("gloo" if processes == 2 else "none", processes, *words, *more, cwd=tmp_path)
        figures.append(summary_of(tmp_path / more[0]))
    cut, whole = figures
    assert cut["mesh"] == {"cp": 2}
    assert cut["global_batch"] == cut["per_replica_batch"] == 8
    assert cut["parameters"] == whole["parameters"]
    for figure in ("train_loss", "val_loss", "val_accuracy"):
        assert cut[figure] == pytest.approx(whole[figure], rel=1e-4)
    assert (tmp_path / "cut" / "model.keras").exists()  # no rank has a part of it
    alone = hvdtrain("none", 1, "evaluate", "cut", cwd=tmp_path)
    assert f"val_loss {cut['val_loss']:.4f}" in alone.out, alone.text


OTHER_MODELS = """
width = 8 * (1 + hvdtrain.rank())
try:
    hvdtrain.parallelize(lambda: keras.Sequential([keras.Input((64,)), keras.layers.Embedding(9, width)]))
    raise SystemExit("ranks that split different models went unnoticed")
except ValueError as error:
    assert "Received: " in str(error), error
"""


def test_the_script_of_the_documentation_trains_and_other_models_are_refused(tmp_path):
    script = blocks_of("docs/context_parallel.md", "python")[0].text
    (tmp_path / "script.py").write_text(script + OTHER_MODELS)
    job = Job(launched("mpirun", 2, "script.py"), cwd=tmp_path).expect("cp 2")
    assert job.out.count("(4, 64, 100)") == 2
