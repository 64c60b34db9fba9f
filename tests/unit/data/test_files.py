"""Pieces of files."""

import numpy as np
import psutil
import pytest
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.blobs import Blobs


@pytest.fixture
def files(tmp_path):
    """Three files whose bytes are their own places, and pieces of them of different lengths."""
    paths = [tmp_path / f"{name}.bin" for name in "abc"]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(range(number * 50, number * 50 + 50)))
    return paths


def pieces(files, **options):
    return Blobs(files, [0, 0, 1, 2, 2], [0, 40, 7, 0, 49], [5, 10, 1, 50, 1], **options)


EXPECTED = [range(5), range(40, 50), [57], range(100, 150), [149]]


@pytest.mark.parametrize("kept_open", [0, 1, 256])
def test_pieces_are_read_in_any_order(files, monkeypatch, kept_open):
    monkeypatch.setattr("hvdtrain.data.blobs.KEPT_OPEN", kept_open)
    blobs = pieces(files)
    for number in (4, 0, 3, 3, 1, 2):
        assert blobs.read(number) == bytes(EXPECTED[number])
    numbers = tf.constant([2, 0, 4], tf.int64)
    assert [piece.numpy() for piece in blobs.tensor(numbers)] == [bytes(EXPECTED[n]) for n in (2, 0, 4)]
    dataset = tf.data.Dataset.from_tensors(numbers).repeat(20).map(blobs.tensor, num_parallel_calls=8)
    assert {tuple(part.numpy()) for part in dataset} == {tuple(bytes(EXPECTED[n]) for n in (2, 0, 4))}


def test_no_file_stays_open(files, monkeypatch):
    def held():
        return sum(file.path.startswith(str(files[0].parent)) for file in psutil.Process().open_files())

    monkeypatch.setattr("hvdtrain.data.blobs.KEPT_OPEN", 2)
    blobs = pieces(files)
    for number in range(5):
        blobs.read(number)
    assert held() == 2
    del blobs
    assert held() == 0


def test_what_cannot_be_read_is_named(files):
    files[0].write_bytes(b"short")
    files[1].unlink()
    files[2].unlink()
    files[2].mkdir()
    blobs = pieces(files)
    assert blobs.read(0) == b"short"
    for number, said in (
        (1, r"a\.bin, byte 40: the file ends 10 bytes too early"),
        (2, r"b\.bin.*No such file"),
        (3, r"c\.bin.*directory"),
    ):
        with pytest.raises(DataError, match=said):
            blobs.read(number)


def test_a_fingerprint_is_of_names_and_places(files):
    same = {pieces(files).fingerprint() for _ in range(2)}
    assert len(same) == 1
    other = Blobs(files, [0, 0, 1, 2, 2], [0, 40, 8, 0, 49], [5, 10, 1, 50, 1])
    assert other.fingerprint() not in same


def test_no_pieces(files):
    with pytest.raises(DataError, match=r"nothing to read in .*a\.bin"):
        Blobs(files, np.array([]), np.array([]), np.array([]))
