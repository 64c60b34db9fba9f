import re

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data import pack as packing
from hvdtrain.data.pack import IMAGE, LABEL, NAME
from hvdtrain.data.registry import load_splits
from tests.unit.file_modes import closed
from tests.unit.images import tar_of

CLASSES = ("ant", "bee", "cat")


@pytest.fixture(autouse=True)
def _surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HVDTRAIN_DATA", raising=False)


def write(folder, number):
    """An image that tells its number: in its first pixel."""
    pixels = np.random.default_rng(number).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    pixels[0, 0] = number
    file = folder / CLASSES[number // 10] / f"{number:02}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(tf.io.encode_png(pixels).numpy())


@pytest.fixture
def source(tmp_path):
    """Three classes of ten images each, numbered through."""
    for number in range(30):
        write(tmp_path / "source", number)
    return tmp_path / "source"


def pack(source, dest, **options):
    """Pack to the end, and return the numbers of images after each shard."""
    return list(packing.pack(source, dest, **options))


def load(path, kind="tfrecord", **arguments):
    return load_splits(DataConfig(kind, {"path": str(path), **arguments}))


def numbers_of(source):
    images, labels = source.gather(tf.range(source.size, dtype=tf.int64))
    numbers = images.numpy()[:, 0, 0, 0]
    assert (labels.numpy() == numbers // 10).all()
    return numbers.tolist()


def records(folder):
    """The features of the records of each file."""
    return {
        file.name: [
            tf.train.Example.FromString(record).features.feature
            for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator()
        ]
        for file in sorted(folder.glob("*.tfrecord"))
    }


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_all_images_are_packed_as_they_are_and_mixed(source, tmp_path):
    dest = tmp_path / "packed"
    assert pack(source, dest, shards=4) == [(8, 30), (16, 30), (23, 30), (30, 30)]
    shards = records(dest)
    assert list(shards) == [f"train-{number:05}-of-00004.tfrecord" for number in range(4)]
    stored = [entry for shard in shards.values() for entry in shard]
    names = [entry[NAME].bytes_list.value[0].decode() for entry in stored]
    assert sorted(names) == sorted(f"{CLASSES[n // 10]}/{n:02}.png" for n in range(30))
    for entry, name in zip(stored, names, strict=True):
        assert entry[IMAGE].bytes_list.value[0] == (source / name).read_bytes()
        assert entry[LABEL].int64_list.value[0] == CLASSES.index(name.split("/")[0])
    assert all(len({entry[LABEL].int64_list.value[0] for entry in shard}) > 1 for shard in shards.values())


def test_packing_again_elsewhere_gives_the_same_bytes(source, tmp_path):
    for name in "ab":
        pack(source, tmp_path / name, shards=3, validation=6)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


@pytest.mark.parametrize("suffix", ["", ".tar", ".tar.gz"])
def test_the_loader_finds_every_image_and_the_classes(source, tmp_path, suffix):
    packed = tmp_path / "packed"
    whole = tar_of(source, tmp_path / f"all{suffix}", {".tar": "w", ".tar.gz": "w:gz"}[suffix]) if suffix else source
    pack(whole, packed, shards=2)
    splits = load(packed)
    assert (splits.sample_shape, splits.classes, splits.preprocessing.class_names) == ((6, 5, 3), 3, CLASSES)
    assert sorted(numbers_of(splits.train) + numbers_of(splits.validation)) == list(range(30))


def test_the_images_held_out_are_those_that_the_folder_itself_holds_out(source, tmp_path):
    pack(source, tmp_path / "packed", shards=2, validation=6)
    splits = load(tmp_path / "packed")
    own = load(source, "class_folders", validation=6)
    assert sorted(number // 10 for number in numbers_of(splits.validation)) == [0, 0, 1, 1, 2, 2]
    assert sorted(numbers_of(splits.validation)) == sorted(numbers_of(own.validation))
    assert sorted(numbers_of(splits.train)) == sorted(numbers_of(own.train))
    with pytest.raises(ConfigError, match="leave out --data-args validation"):
        load(tmp_path / "packed", validation=3)


def test_folders_for_validation_become_shards_of_their_own(source, tmp_path):
    for number in range(30):
        write(tmp_path / "split" / ("val" if number % 5 == 0 else "train"), number)
    pack(tmp_path / "split", tmp_path / "packed", shards=4)
    assert [len(shard) for shard in records(tmp_path / "packed").values()] == [6, 6, 6, 6, 6]
    assert sorted(numbers_of(load(tmp_path / "packed").validation)) == list(range(0, 30, 5))
    with pytest.raises(ConfigError, match="has images for validation already: leave out --validation"):
        pack(tmp_path / "split", tmp_path / "again", validation=3)


def test_a_pack_that_fails_leaves_nothing(source, tmp_path):
    before = sorted(tmp_path.iterdir())
    with closed(source / "bee/13.png"), pytest.raises(DataError, match=r"bee/13\.png.*Permission denied"):
        pack(source, tmp_path / "packed", shards=30)
    written = packing.pack(source, tmp_path / "packed", shards=30)
    next(written)
    written.close()
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_overwritten(source, tmp_path):
    pack(source, tmp_path / "packed")
    before = files_of(tmp_path / "packed")
    (tmp_path / "file").touch()
    for taken in ("packed", "file"):
        with pytest.raises(DataError, match=rf"{taken} exists already, and nothing in it is overwritten"):
            pack(source, tmp_path / taken, shards=2)
    assert files_of(tmp_path / "packed") == before
    (tmp_path / "empty").mkdir()
    pack(source, tmp_path / "empty")
    assert files_of(tmp_path / "empty") == before
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/no/packed cannot be written: No such file")):
        pack(source, tmp_path / "no/packed")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shards": -1}, "--shards must be from 0 to 30, the training images. Received: -1."),
        ({"shards": 31}, "--shards must be from 0 to 30"),
        ({"validation": 30}, "--validation must be from 0 to 29 images. Received: 30."),
        ({"validation": -1}, "--validation must be from 0 to 29"),
    ],
)
def test_numbers_out_of_range_are_refused(source, tmp_path, options, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        pack(source, tmp_path / "packed", **options)
    assert not (tmp_path / "packed").exists()


def test_a_shard_that_is_missing_is_noticed(source, tmp_path):
    pack(source, tmp_path / "packed", shards=3)
    (tmp_path / "packed/train-00001-of-00003.tfrecord").unlink()
    with pytest.raises(DataError, match=r"packed holds 2 of 3 files train-\*-of-\*: some are missing"):
        load(tmp_path / "packed")
    assert load(tmp_path / "packed/train-*").train.size == 18
