"""Data as users have them: class folders, damaged files, runs that are resumed on other numbers of ranks."""

import json
import sys

import keras
import numpy as np
import pytest

from tests.entry.test_mistakes import refused
from tests.launching import Job, hvdtrain, launched, summary_of
from tests.unit.images import tar_of, write_folders

pytestmark = pytest.mark.extended

IMAGES = ["--data", "class_folders", "--model", "small_cnn", "--batch", "8", "--epochs", "2", "--plots", "False"]

VISITS = """
import keras
import numpy as np

SAMPLES, BATCH = 37, 8


def data():
    numbers = np.arange(SAMPLES, dtype="int32").reshape(-1, 1)
    part = (numbers, np.zeros((SAMPLES, 1), "float32"))
    return part, part


def model(sample_shape):
    # The gradient of a sample's own weight is 1/BATCH for each visit: it counts them.
    table = keras.layers.Embedding(SAMPLES, 1, embeddings_initializer="zeros", name="visits")
    return keras.Sequential([keras.Input(sample_shape, dtype="int32"), table, keras.layers.Flatten()])


def loss(y_true, y_pred):
    return y_pred[:, 0] * BATCH
"""


def visits(run_dir):
    """Return how often each sample was visited, by the model that a run left.

    A visit in a full batch of 8 counts 1; one in an epoch's last batch of 5, whose mean is over 5, counts 1.6.
    """
    model = keras.saving.load_model(run_dir / "model.keras", compile=False)
    sums = -model.get_layer("visits").get_weights()[0][:, 0]
    ways = {round(10 * (full + 1.6 * short)): full + short for full in range(5) for short in range(5 - full)}
    return np.array([ways[round(10 * float(value))] for value in sums])


def test_ranks_come_and_go_and_no_sample_is_lost_or_repeated(tmp_path):
    """1, 2, 4 and 1 ranks go on with one run, also within an epoch; each has 4 full batches and one of 5 samples."""
    (tmp_path / "counting.py").write_text(VISITS)
    words = "--model counting:model --data counting:data --loss counting:loss --optimizer sgd --learning-rate 1"
    first = [
        *words.split(),
        "--schedule",
        "constant",
        "--batch",
        "8",
        "--epochs",
        "4",
        "--run-dir",
        "run",
        "--plots",
        "False",
    ]
    legs = [("none", 1, 3), ("mpirun", 2, 8), ("gloo", 4, 14), ("none", 1, 20)]
    for number, (controller, size, last) in enumerate(legs):
        start = ["--resume", "run"] if number else first
        hvdtrain(controller, size, *start, "--max-steps", str(last), cwd=tmp_path, PYTHONPATH=str(tmp_path))
        epochs, steps = divmod(last, 5)
        assert np.bincount(visits(tmp_path / "run")).tolist()[epochs:] == [37 - 8 * steps, 8 * steps][: 1 + (steps > 0)]


@pytest.mark.parametrize(("controller", "size"), [("none", 1), ("mpirun", 2)])
def test_class_folders(tmp_path, controller, size):
    write_folders(tmp_path / "photos", each=20, kind="jpeg")
    tar_of(tmp_path / "photos", tmp_path / "photos.tar.gz")
    words = [*IMAGES, "--data-args", "path", "photos.tar.gz", "--augment", "crop", "flip", "--run-dir", "run"]
    words += ["--cache", {1: "memory", 2: "file"}[size]]
    hvdtrain(controller, size, *words, cwd=tmp_path, HVDTRAIN_CACHE=str(tmp_path / "cache"))
    summary = summary_of(tmp_path / "run")
    assert summary["steps"] == 10
    assert 0.0 <= summary["data_wait"] <= 1.0


def test_a_damaged_image_is_named_and_can_be_left_out(tmp_path):
    files = write_folders(tmp_path / "photos/train", each=20)
    held = write_folders(tmp_path / "photos/val", each=4)
    for file in files[3], files[21], held[2]:
        file.write_bytes(file.read_bytes()[:50])
    words = [*IMAGES, "--data-args", "path", "photos"]
    refused(
        hvdtrain("mpirun", 2, *words, "--run-dir", "one", cwd=tmp_path, code=None), "photos/", "0", ".png", "skip:N"
    )
    job = hvdtrain("mpirun", 2, *words, "--on-bad-record", "skip:2", "--run-dir", "two", cwd=tmp_path)
    summary = summary_of(tmp_path / "two")
    assert 0 < summary["bad_records"] == len(summary["left_out"]) <= 3
    assert all(".png: " in text for text in summary["left_out"])
    assert "could not be read and did not count" in job.text
    # More epochs read the same samples: what was left out stays so, and is counted once.
    job = hvdtrain("none", 1, "--resume", "two", "--epochs", "3", cwd=tmp_path)
    assert summary_of(tmp_path / "two")["left_out"] == summary["left_out"]
    job = hvdtrain("none", 1, "evaluate", "two", cwd=tmp_path)
    assert "warning: 1 sample could not be read and did not count: photos/val/ant/002.png: " in job.text
    (told,) = json.loads((tmp_path / "two/evaluation.json").read_text())["left_out"]
    assert told.startswith("photos/val/ant/002.png: ")


def test_a_file_that_one_rank_does_not_have(tmp_path):
    for rank in (0, 1):
        write_folders(tmp_path / f"host{rank}/photos", each=5 + rank)
    (tmp_path / "host2").mkdir()
    rank = "$OMPI_COMM_WORLD_RANK"
    words = f"{sys.executable} -m hvdtrain {' '.join(IMAGES)} --data-args path photos"

    def started(folder):
        script = f"HVDTRAIN_DATA=$PWD/host$(( {folder} )) exec {words}"
        return Job(launched("mpirun", 2, "-c", script, program="bash"), cwd=tmp_path).expect(code=None)

    refused(started(f"{rank} * 2"), "There is no", "photos", "host2")
    refused(
        started(f"{rank}"),
        "samples of rank 1 are not those of rank 0 (",
    )
