"""Samples that are decoded once."""

import errno
import os

import pytest
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.cached import cached
from hvdtrain.data.sources.class_folders import scan
from hvdtrain.data.sources.images import ImageSource
from tests.unit.images import write_folders


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    write_folders(tmp_path / "data", each=150)
    found = scan(tmp_path / "data")
    return ImageSource(found.blobs, found.labels, "mine")


def some(source):
    return [part.numpy() for part in source.gather(tf.constant([299, 0, 7, 7, 256], tf.int64))]


@pytest.mark.parametrize("where", ["memory", "file"])
def test_the_same_samples(source, where, tmp_path):
    kept = cached(source, where)
    expected = some(source)
    for folder in (tmp_path / "data").iterdir():
        for file in folder.iterdir():
            file.unlink()  # nothing is read again
    for one, other in zip(some(kept), expected, strict=True):
        assert (one == other).all()
        assert one.dtype == other.dtype
    assert (kept.size, kept.name, kept.spec) == (source.size, source.name, source.spec)
    assert kept.describe(3) != ""


def test_it_is_made_anew_when_an_image_changed_in_place(source, tmp_path):
    before = some(cached(source, "file"))[0]
    file = tmp_path / "data/ant/000.png"
    other = next(
        p for p in sorted((tmp_path / "data").rglob("*.png")) if p != file and p.stat().st_size == file.stat().st_size
    )
    file.write_bytes(other.read_bytes())
    os.utime(file, (1, 1))
    found = scan(tmp_path / "data")
    after = some(cached(ImageSource(found.blobs, found.labels, "mine"), "file"))[0]
    assert (after[1] != before[1]).any()
    assert (after[2:] == before[2:]).all()


def test_a_file_that_was_not_finished_is_made_again(source, tmp_path):
    cached(source, "file")
    (done,) = (tmp_path / "cache").glob("*.json")
    done.unlink()
    for file in (tmp_path / "cache").glob("*.npy"):
        file.write_bytes(b"half")
    assert (some(cached(source, "file"))[0] == some(source)[0]).all()


def test_a_bad_record_is_named(source, tmp_path):
    (tmp_path / "data/bee/140.png").write_bytes(b"x" * 200)
    found = scan(tmp_path / "data")
    with pytest.raises(DataError, match=r"bee/140\.png"):
        cached(ImageSource(found.blobs, found.labels, "mine"), "memory")


def test_a_disk_without_room_is_told_before_anything_is_decoded(source, tmp_path, monkeypatch):
    asked = []

    def refuse(descriptor, offset, length):
        asked.append((offset, length))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(source, "gather", None)
    with pytest.raises(DataError, match=r"mine cannot be kept in .*cache: No space left on device\."):
        cached(source, "file")
    ((offset, length),) = asked
    assert offset == 0
    assert length > 300 * 8 * 8 * 3
    assert not [file for file in (tmp_path / "cache").iterdir() if file.suffix in (".npy", ".draft")]
