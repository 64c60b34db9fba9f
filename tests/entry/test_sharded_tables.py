"""Embedding tables divided among ranks, from the command line."""

import pytest

from tests.launching import hvdtrain, summary_of

pytestmark = pytest.mark.extended

DLRM = "--batch 8 --data-args samples 60 rows 20 --model-args rows 20 dim 4 width 8 --epochs 1 --log-every 4"
RUN = "--plots False --tensorboard False --run-dir"


def train(folder, controller, size, name, *more):
    job = hvdtrain(controller, size, "dlrm", *DLRM.split(), *RUN.split(), name, *more, cwd=folder)
    return summary_of(folder / name), job


def test_dlrm_on_two_ranks_with_divided_tables_is_that_of_one_process(tmp_path):
    one, _ = train(tmp_path, "none", 1, "one", "--embedding-sharding", "table")
    assert (tmp_path / "one" / "model.keras").exists()
    two, job = train(tmp_path, "mpirun", 2, "two", "--embedding-sharding", "row")
    assert two["parameters"] == one["parameters"]
    assert two["mesh"] == {"ep": 2}
    for figure in ("train_loss", "val_loss", "val_auc"):
        assert two[figure] == pytest.approx(one[figure], rel=1e-5)
    assert "checkpoint export two` writes the whole model" in job.text
    assert not (tmp_path / "two" / "model.keras").exists()
    hvdtrain("none", 1, "checkpoint", "export", "two", "--to", "whole.keras", cwd=tmp_path)
    import keras  # without this package's layers

    assert keras.models.load_model(tmp_path / "whole.keras").count_params() == one["parameters"]
