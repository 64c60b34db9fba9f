"""`data pack` as it is typed."""

import pytest

from tests.launching import hvdtrain, summary_of
from tests.unit.images import write_folders

pytestmark = pytest.mark.extended


def pack(folder, *words):
    job = hvdtrain("none", 1, "data", "pack", *words, cwd=folder, timeout=200)
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
    hvdtrain("mpirun", 2, *words, "--epochs", "1", "--run-dir", "run", cwd=tmp_path)
    assert summary_of(tmp_path / "run")["steps"] == 4
