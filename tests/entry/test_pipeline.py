"""Pipeline parallelism as a user types it: a recipe, and the script of docs/pipeline_parallel.md."""

import pytest

from tests.entry.docs.pages import blocks_of
from tests.launching import Job, hvdtrain, launched, summary_of

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("pipeline")]
OPTIONS = ("--model", "mlp", "--model-args", "width", "32", "--accumulate", "4", "--seed", "3")


def test_a_run_on_two_stages_goes_on_in_one_process_as_if_it_had_been_there_from_the_start(tmp_path):
    words = ("digits", *OPTIONS, "--run-dir", "cut", "--epochs", "1", "--schedule", "constant")
    job = hvdtrain("mpirun", 2, *words, "--parallel", "pp=2", "--pipeline-stages", "hidden2", cwd=tmp_path)
    assert "2 stages begin with flatten (" in job.out
    assert "hidden2 (" in job.out
    assert "checkpoint export cut` writes the whole model" in job.text
    assert not (tmp_path / "cut" / "model.keras").exists()
    first = summary_of(tmp_path / "cut")
    for command in (
        ("--resume", "cut", "--epochs", "2", "--parallel", "dp=-1"),
        ("digits", *OPTIONS, "--epochs", "2", "--schedule", "constant", "--run-dir", "plain"),
    ):
        job = hvdtrain("none", 1, *command, cwd=tmp_path)
    cut, plain = (summary_of(tmp_path / name) for name in ("cut", "plain"))
    assert first["mesh"] == {"pp": 2}
    assert first["parameters"] == plain["parameters"]
    assert cut["steps"] == plain["steps"] == 2 * first["steps"]
    assert cut["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-4)
    assert cut["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-4)


REFUSED = """
width = 8 + hvdtrain.rank()
try:
    hvdtrain.Trainer(build, "adam", loss, jit=True)
    raise SystemExit("jit went unnoticed")
except ValueError as error:
    assert "jit does not go with" in str(error), error
try:
    layers = [keras.layers.Dense(width), keras.layers.Dense(3)]
    hvdtrain.Trainer(keras.Sequential([keras.Input((8,)), *layers]), "adam", loss)
    raise SystemExit("ranks that cut different models went unnoticed")
except ValueError as error:
    assert "Every rank cuts the same model at the same places. Received: rank 1" in str(error), error
"""


def test_the_script_of_the_documentation_trains_and_mistakes_are_named(tmp_path):
    script = blocks_of("docs/pipeline_parallel.md", "python")[0].text
    (tmp_path / "script.py").write_text(script + REFUSED)
    job = Job(launched("gloo", 2, "script.py"), cwd=tmp_path).expect()
    shapes = sorted(line.rpartition(":")[2] for line in job.out.splitlines() if "(5, 3)" in line)
    assert shapes == ["(5, 3) 2", "(5, 3) 3"]
