import re

import numpy as np
import pytest
import tensorflow as tf
import yaml

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.bad_records import BadRecords
from hvdtrain.data.registry import load_splits
from hvdtrain.data.sources.tfrecord_files import read_index

SIZES = (0, 1, 7, 5000, 70000)
DESCRIPTION = {
    "features": {
        "image": {"kind": "image", "shape": [4, 5, 3]},
        "label": {"kind": "int64", "dtype": "int32"},
        "weight": {"kind": "float32"},
    },
    "inputs": "image",
    "targets": "label",
    "sample_weight": "weight",
    "classes": 3,
    "name": "name",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("HVDTRAIN_CACHE", str(folder))
    monkeypatch.delenv("HVDTRAIN_DATA", raising=False)
    return folder


def example(**entries):
    def feature(value):
        values = value if isinstance(value, list) else [value]
        if isinstance(values[0], bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        if isinstance(values[0], int):
            return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    features = tf.train.Features(feature={key: feature(value) for key, value in entries.items()})
    return tf.train.Example(features=features).SerializeToString()


def pixels(number, height=4, width=5):
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def sample(number, **changed):
    image = tf.io.encode_png(pixels(number)).numpy()
    entries = {"image": image, "label": number % 3, "weight": number / 2, "name": f"n{number}".encode()}
    return example(**{**entries, **changed})


def write(path, records, kind=""):
    """Let TensorFlow itself write the file."""
    with tf.io.TFRecordWriter(str(path), tf.io.TFRecordOptions(compression_type=kind)) as writer:
        for record in records:
            writer.write(record)
    return path


@pytest.fixture
def folder(tmp_path):
    """Two files of six records each, and their description."""
    folder = tmp_path / "records"
    folder.mkdir()
    for part in range(2):
        write(folder / f"part-{part}.tfrecord", [sample(6 * part + place) for place in range(6)])
    (folder / "features.yaml").write_text(yaml.safe_dump(DESCRIPTION))
    return folder


def load(path, **arguments):
    return load_splits(DataConfig("tfrecord", {"path": str(path), **arguments}))


def gathered(source, *numbers):
    return [part.numpy() for part in source.gather(tf.constant(numbers, tf.int64))]


def everything(splits):
    """The weights, by which the samples can be told apart, of both parts."""
    return [gathered(part, *range(part.size))[2] * 2 for part in (splits.train, splits.validation)]


# The format


def test_records_are_found_where_tensorflow_wrote_them(tmp_path):
    records = [bytes(range(256)) * (size // 256) + b"x" * (size % 256) for size in SIZES]
    path = write(tmp_path / "a.tfrecord", records)
    index = read_index(path)
    data = path.read_bytes()
    assert [data[o : o + n] for o, n in zip(index.offsets, index.lengths, strict=True)] == records
    footers = [data[o + n : o + n + 4] for o, n in zip(index.offsets, index.lengths, strict=True)]
    assert [int(c).to_bytes(4, "little") for c in index.checksums] == footers


@pytest.mark.parametrize(("cut", "number"), [(1, 2), (4, 2), (5, 2), (104, 2), (105, 2), (116, 1), (117, 1)])
def test_a_file_that_ends_too_early_is_named_with_the_record(tmp_path, cut, number):
    path = write(tmp_path / "a.tfrecord", [b"z" * 100] * 3)  # 116 bytes each
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    if cut == 116:
        assert len(read_index(path).offsets) == 2  # between records: nothing tells that there was one more
        return
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}, record {number}: the file ends \d+ bytes too early"):
        read_index(path)


@pytest.mark.parametrize("byte", range(12))
def test_a_damaged_length_is_named_with_the_record(tmp_path, byte):
    path = write(tmp_path / "a.tfrecord", [b"z" * 100] * 3)
    data = bytearray(path.read_bytes())
    data[116 + byte] ^= 16
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.tfrecord, record 1: its length is damaged"):
        read_index(path)


# The source


def test_samples_are_those_that_were_written(folder):
    splits = load(folder, validation=3)
    assert (splits.sample_shape, splits.classes) == ((4, 5, 3), 3)
    assert (splits.train.size, splits.validation.size) == (9, 3)
    train, held = everything(splits)
    assert sorted([*train, *held]) == list(range(12))
    images, labels, weights = gathered(splits.train, 4, 0, 4)
    numbers = [int(train[place]) for place in (4, 0, 4)]
    assert (images == np.stack([pixels(number) for number in numbers])).all()
    assert (images.dtype, labels.dtype) == (np.uint8, np.int32)
    assert list(labels) == [number % 3 for number in numbers]
    assert list(weights) == [number / 2 for number in numbers]


@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
def test_compressed_files_hold_the_same_samples(folder, cache, kind):
    expected = everything(load(folder))
    plain = load(folder).train.fingerprint()
    for part in range(2):
        write(folder / f"part-{part}.tfrecord", [sample(6 * part + place) for place in range(6)], kind)
    splits = load(folder)
    assert all((a == b).all() for a, b in zip(everything(splits), expected, strict=True))
    assert splits.train.fingerprint() == plain
    before = sorted(cache.iterdir())
    load(folder)
    assert sorted(cache.iterdir()) == before


@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
def test_a_compressed_file_that_is_cut_is_refused(folder, kind):
    path = write(folder / "part-1.tfrecord", [sample(place) for place in range(6)], kind)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"part-1\.tfrecord.*damaged"):
        load(folder)


def test_a_file_that_changes_is_indexed_anew(folder):
    assert load(folder, validation=1).train.size == 11
    write(folder / "part-1.tfrecord", [sample(place) for place in range(9)])
    assert load(folder, validation=1).train.size == 14


def test_paths_may_be_files_patterns_and_below_the_data_folder(folder, monkeypatch):
    assert load(folder / "part-1.tfrecord", validation=2).train.size == 4
    assert load(f"{folder}/part-*", validation=2).train.size == 10
    monkeypatch.setenv("HVDTRAIN_DATA", str(folder.parent))
    monkeypatch.chdir("/")
    assert load("records", validation=2).train.size == 10
    assert load("records/part-[0].*", validation=2).train.size == 4


def test_splits_are_told_by_the_names_of_files(folder):
    (folder / "part-0.tfrecord").rename(folder / "train-00000-of-00001")
    (folder / "part-1.tfrecord").rename(folder / "validation-00000-of-00001")
    train, held = everything(load(folder))
    assert (list(train), list(held)) == (list(range(6)), list(range(6, 12)))
    with pytest.raises(ConfigError, match="leave out --data-args validation"):
        load(folder, validation=2)


def test_validation_may_have_a_path_of_its_own(folder):
    splits = load(folder / "part-1.tfrecord", validation_path=str(folder / "part-0.tfrecord"))
    train, held = everything(splits)
    assert (list(train), list(held)) == (list(range(6, 12)), list(range(6)))


def test_images_of_any_size_are_brought_to_one(folder):
    image = tf.io.encode_jpeg(pixels(1, 30, 20)).numpy()
    write(folder / "part-1.tfrecord", [sample(place, image=image) for place in range(6)])
    splits = load(folder, image_size=8)
    assert splits.sample_shape == (8, 8, 3)
    assert gathered(splits.train, *range(splits.train.size))[0].shape == (splits.train.size, 8, 8, 3)


def test_raw_tensors_numbers_and_several_inputs(tmp_path):
    arrays = np.random.default_rng(0).standard_normal((8, 2, 3)).astype(np.float16)
    records = [example(raw=array.tobytes(), ids=[i, -i], y=[i / 4, 1.0]) for i, array in enumerate(arrays)]
    write(tmp_path / "a.tfrecord", records)
    described = {
        "features": {
            "raw": {"kind": "bytes", "dtype": "float16", "shape": [2, 3]},
            "ids": {"kind": "int64", "shape": [2]},
            "y": {"kind": "float32", "shape": [2]},
        },
        "inputs": {"left": "raw", "right": "ids"},
        "targets": "y",
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(described))
    splits = load(tmp_path / "a.tfrecord", features=str(tmp_path / "own.yaml"), validation=1)
    assert (splits.sample_shape, splits.classes, splits.finish) == ({"left": (2, 3), "right": (2,)}, None, None)
    assert not splits.train.finite
    inputs, targets = splits.train.gather(tf.range(7, dtype=tf.int64))
    numbers = (targets.numpy()[:, 0] * 4).astype(int)
    assert len(set(numbers)) == 7
    assert (inputs["left"].numpy() == arrays[numbers]).all()
    assert (inputs["right"].numpy() == np.stack([numbers, -numbers], 1)).all()


def test_the_fingerprint_follows_what_the_records_hold(folder):
    first = load(folder).train.fingerprint()
    assert load(folder).train.fingerprint() == first
    assert load(folder, image_size=8).train.fingerprint() != first
    write(folder / "part-1.tfrecord", [sample(place, label=0) for place in range(6, 12)])
    assert load(folder).train.fingerprint() != first


# What goes wrong


def second_file(folder):
    """All records of the folder's second file, in their order."""
    return load(folder / "part-1.tfrecord", validation_path=str(folder / "part-0.tfrecord")).train


def trouble(source):
    """What is said of the bad samples of `source`, as the pipeline finds it."""
    bad = BadRecords(source, limit=source.size)
    bad.examine(np.arange(source.size), RuntimeError("nothing is bad"))
    return list(bad.found.values())


def test_a_damaged_record_is_named(folder):
    path = folder / "part-1.tfrecord"
    index = read_index(path)
    data = bytearray(path.read_bytes())
    data[index.offsets[2] + index.lengths[2] // 2] ^= 1
    path.write_bytes(data)
    source = second_file(folder)
    said = "part-1.tfrecord, record 2 (n8): the record is damaged (its checksum is wrong)"
    assert trouble(source) == [said]
    with pytest.raises(DataError, match=re.escape(said)):
        gathered(source, 0, 2)
    with pytest.raises(tf.errors.OpError, match=re.escape(said)):
        list(tf.data.Dataset.from_tensor_slices([[0, 2]]).map(source.gather))
    assert list(gathered(source, 0, 1, 3)[2]) == [3.0, 3.5, 4.5]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"label": 3}, "the label 3 is not one of 3 classes"),
        ({"label": -1}, "the label -1 is not one of 3 classes"),
        ({"label": [1, 2]}, "Key: label"),
        ({"label": 1.5}, "Key: label"),
        ({"image": b"no image"}, "Unknown image file format"),
        ({"image": tf.io.encode_png(pixels(0, 5, 5)).numpy()}, "the image 'image' is not [4, 5, 3] in size"),
    ],
)
def test_a_record_that_does_not_fit_is_named(folder, changed, said):
    write(folder / "part-1.tfrecord", [sample(place, **(changed if place == 4 else {})) for place in range(6)])
    (line,) = trouble(second_file(folder))
    assert line.startswith("part-1.tfrecord, record 4 (n4): ")
    assert said in line


def test_a_record_without_an_entry_or_of_another_kind_is_named(folder):
    without = example(label=1, weight=0.5, name=b"a")
    write(folder / "part-1.tfrecord", [sample(0), without, b"\xff no Example", b"\n\x05short", sample(4)])
    lines = trouble(second_file(folder))
    assert [line[:25] for line in lines] == [f"part-1.tfrecord, record {number}" for number in (1, 2, 3)]
    assert "Feature: image" in lines[0]
    assert "required" in lines[0]
    assert all("it is not a tf.train.Example" in line for line in lines[1:])


def test_records_that_the_description_is_not_of_are_refused_at_the_start(folder):
    write(folder / "part-1.tfrecord", [example(label=1, picture=b"x")] * 3)
    with pytest.raises(DataError, match=r"record 0 has no 'image', .*: it holds label \(int64\), picture \(bytes\)\."):
        second_file(folder)
    write(folder / "part-1.tfrecord", [b"some words of text"] * 3)
    with pytest.raises(DataError, match=r"record 0 has no 'image', .*: it is not a tf\.train\.Example"):
        second_file(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": "imago"}, "trains on 'imago', which is none of its features (image, label, weight)"),
        ({"classes": 0}, "needs at least 1 class. Received: classes: 0."),
        ({"clases": 3}, "clases: Unexpected keyword argument"),
        ({"features": {**DESCRIPTION["features"], "label": {"kind": "int"}}}, "features.label.kind: "),
        (
            {"features": {**DESCRIPTION["features"], "label": {"kind": "int64", "shape": [None]}}},
            "a dim of 'label' open",
        ),
        (
            {"features": {**DESCRIPTION["features"], "image": {"kind": "image", "shape": [4, 5]}}},
            "[height, width, 1, 3",
        ),
        ({"features": {**DESCRIPTION["features"], "label": {"kind": "int64", "dtype": "i"}}}, "unknown dtype: 'i'"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(folder, change, said):
    (folder / "features.yaml").write_text(yaml.safe_dump({**DESCRIPTION, **change}))
    with pytest.raises(DataError, match=re.escape(said)):
        load(folder)


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", ""])
def test_a_description_that_is_none_is_named(folder, text):
    (folder / "features.yaml").write_text(text)
    with pytest.raises(DataError, match=re.escape(str(folder / "features.yaml"))):
        load(folder)


def test_files_without_a_description_tell_what_they_hold(folder):
    (folder / "features.yaml").unlink()
    with pytest.raises(DataError, match=r"image \(bytes\), label \(int64\), name \(bytes\), weight \(float\)"):
        load(folder)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "--data-args path PATH"),
        ("nowhere", "There is no "),
        ("nowhere/*.tfrecord", "No file matches 'nowhere/*.tfrecord'"),
        ("empty", "holds no TFRecord files"),
        ("hollow", "There is nothing to read in"),
    ],
)
def test_nothing_there_is_said(tmp_path, monkeypatch, path, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow").mkdir()
    write(tmp_path / "hollow" / "a.tfrecord", [])
    with pytest.raises(DataError, match=re.escape(said)):
        load(path)


def test_a_folder_in_a_files_place_is_refused(tmp_path):
    (tmp_path / "a.tfrecord").mkdir()
    with pytest.raises(DataError, match="holds no TFRecord files"):
        load(tmp_path / "a.tfrecord")


def test_an_image_size_needs_images(tmp_path):
    write(tmp_path / "a.tfrecord", [example(x=1, y=2)] * 4)
    described = {"features": {"x": {"kind": "int64"}, "y": {"kind": "int64"}}, "inputs": "x", "targets": "y"}
    (tmp_path / "features.yaml").write_text(yaml.safe_dump(described))
    with pytest.raises(ConfigError, match="image_size is for images"):
        load(tmp_path / "a.tfrecord", image_size=8)
    with pytest.raises(ConfigError, match="image_size and validation of 0 or more"):
        load(tmp_path / "a.tfrecord", image_size=-1)
