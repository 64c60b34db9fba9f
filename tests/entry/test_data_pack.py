"""`data pack` as it is typed."""

import json
import os
from pathlib import Path

import pytest

from tests.launching import hvdtrain
from tests.unit.images import write_folders

pytestmark = pytest.mark.extended

IMAGES = "cifar10-train.tar.gz"


def pack(folder, *words):
    job = hvdtrain("none", 1, "data", "pack", *words, cwd=folder, timeout=200)
    assert job.code == 0, job.text[-4000:]
    assert job.err == ""
    return job.out


def test_packed_images_are_trained_on(tmp_path):
    write_folders(tmp_path / "images", each=20)
    said = pack(tmp_path, "images", "packed", "--shards", "2", "--validation", "8")
    assert said.splitlines()[-2:] == [
        "packed holds 40 images in 3 files.",
        "Train on it with --data tfrecord --data-args path packed",
    ]
    words = ("--data", "tfrecord", "--data-args", "path", "packed", "--shard-by", "files", "--batch", "8")
    job = hvdtrain("mpirun", 2, *words, "--epochs", "1", "--run-dir", "run", cwd=tmp_path)
    assert job.code == 0, job.text[-4000:]
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 4


@pytest.mark.data
def test_real_images_go_through_unchanged(tmp_path):
    data = os.environ.get("HVDTRAIN_DATA")
    if not data or not (Path(data) / IMAGES).is_file():
        pytest.skip(f"the folder HVDTRAIN_DATA holds no {IMAGES}")
    said = pack(tmp_path, IMAGES, "packed", "--shards", "8", "--validation", "5000")
    assert "packed holds 50,000 images in 9 files." in said
