"""`--parallel tp=2` and `hvdtrain.parallelize` as a user types them: trained, evaluated and exported whole."""

import keras
import pytest

from tests.entry.docs.pages import blocks_of
from tests.launching import Job, hvdtrain, launched, summary_of

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("tensor_parallel")]
SMALL = ["--max-steps", "4", "--model-args", "depth", "1", "width", "32", "heads", "4", "dropout", "0.0"]


def test_a_recipe_trains_split_and_its_checkpoint_is_whole(tmp_path):
    words = ["gpt_char", "--parallel", "tp=2", "--sequence-parallel", *SMALL, "--run-dir", "run"]
    job = hvdtrain("mpirun", 2, *words, cwd=tmp_path)
    assert "horovod (mpi), 2 ranks on a mesh of tp 2 by mpirun" in job.out
    summary = summary_of(tmp_path / "run")
    assert summary["mesh"] == {"tp": 2}
    alone = hvdtrain("none", 1, "evaluate", "run", cwd=tmp_path)
    assert f"val_loss {summary['val_loss']:.4f}" in alone.out, alone.text
    hvdtrain("none", 1, "checkpoint", "export", "run", "--to", "whole.keras", cwd=tmp_path)
    model = keras.models.load_model(tmp_path / "whole.keras", compile=False)
    assert model.get_layer("block0_mlp_in").kernel.shape == (32, 128)
    assert model.count_params() == summary["parameters"]
    words = ["--resume", "run", "--max-steps", "5", "--parallel", "dp=-1", "--sequence-parallel", "False"]
    job = hvdtrain("none", 1, *words, cwd=tmp_path)


def test_the_script_of_the_documentation_runs_split(tmp_path):
    (tmp_path / "script.py").write_text(blocks_of("docs/tensor_parallel.md", "python")[0].text)
    job = Job(launched("gloo", 2, "script.py"), cwd=tmp_path).expect("tp 2")
    assert job.out.count("(4, 10)") == 2
