import itertools
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.cli import data_pack
from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.files import features
from hvdtrain.data.packing.pack import PackProgress, pack
from hvdtrain.data.packing.shard_writer import encoded_example
from hvdtrain.data.registry import load_splits
from tests.unit.file_modes import closed

CLASSES = ("ant", "bee", "cat")


@pytest.fixture(autouse=True)
def _surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HVDTRAIN_DATA", raising=False)


def picture(number):
    """An image that tells its number: in its first pixel."""
    pixels = np.random.default_rng(number).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    pixels[0, 0] = number
    return tf.io.encode_png(pixels).numpy()


@pytest.fixture
def source(tmp_path):
    """Three classes of ten images each, numbered through."""
    folder = tmp_path / "source"
    for number in range(30):
        file = folder / CLASSES[number // 10] / f"{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(number))
    return folder


def load(path, **arguments):
    return load_splits(DataConfig("tfrecord", {"path": str(path), **arguments}))


def numbers_of(source):
    images, labels = source.gather(tf.range(source.size, dtype=tf.int64))
    numbers = images.numpy()[:, 0, 0, 0]
    assert (labels.numpy() == numbers // 10).all()
    return numbers.tolist()


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def flip_byte(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


# Packing


def test_an_example_is_what_protobuf_reads():
    entries = {"a": b"\x00\xff" * 100, "long/key": b"", "n": 0, "big": 2**40 + 7, "negative": -3}
    example = tf.train.Example.FromString(encoded_example(entries))
    assert sorted(example.features.feature) == sorted(entries)
    for key, value in entries.items():
        entry = example.features.feature[key]
        values = entry.bytes_list.value if isinstance(value, bytes) else entry.int64_list.value
        assert list(values) == [value]
    # What is written twice must be written alike.
    again = tf.train.Example.FromString(encoded_example(entries)).SerializeToString(deterministic=True)
    assert again == example.SerializeToString(deterministic=True)


def test_what_workers_import_is_without_tensorflow():
    modules = "hvdtrain.__main__, hvdtrain.data.packing.shard_writer"
    code = f"import sys; import {modules}; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_all_images_are_packed_as_they_are_and_mixed(source, tmp_path):
    dest = tmp_path / "packed"
    packed = pack(source, dest, shards=4, workers=2)
    assert sorted(files_of(dest)) == sorted(
        ["features.yaml", "index.json", "index.npz", "packing.json"]
        + [f"train-{number:05}-of-00004.tfrecord" for number in range(4)]
    )
    records = packed.records()
    stored = [tf.train.Example.FromString(records.read(n)).features.feature for n in range(30)]
    names = [entry["image/filename"].bytes_list.value[0].decode() for entry in stored]
    assert sorted(names) == sorted(f"{CLASSES[n // 10]}/{n:02}.png" for n in range(30))
    for entry, name in zip(stored, names, strict=True):
        assert entry["image/encoded"].bytes_list.value[0] == (source / name).read_bytes()
        assert entry["image/class/label"].int64_list.value[0] == CLASSES.index(name.split("/")[0])
    assert names != sorted(names)
    assert {len(set(records.labels[mine])) for mine in packed.bounds()} <= {2, 3}
    assert packed.counts() == {"train": dict.fromkeys(CLASSES, 10)}


def test_packing_again_elsewhere_gives_the_same_bytes(source, tmp_path):
    pack(source, tmp_path / "a", shards=3, workers=1, validation=6)
    pack(source, tmp_path / "b", shards=3, workers=2, validation=6)
    a, b = files_of(tmp_path / "a"), files_of(tmp_path / "b")
    assert {name: data for name, data in a.items() if name != "index.npz"} == {
        name: data for name, data in b.items() if name != "index.npz"
    }


def test_the_loader_finds_every_image(source, tmp_path):
    pack(source, tmp_path / "packed", shards=2, workers=1)
    splits = load(tmp_path / "packed")
    assert (splits.sample_shape, splits.classes) == ((6, 5, 3), 3)
    train, held = numbers_of(splits.train), numbers_of(splits.validation)
    assert sorted(train + held) == list(range(30))
    assert sorted(number // 10 for number in held) == [0, 1, 2]  # one of ten, of each class


def test_the_images_held_out_are_those_that_the_folder_itself_holds_out(source, tmp_path):
    packed = pack(source, tmp_path / "packed", shards=2, workers=1, validation=6)
    splits = load(tmp_path / "packed")
    assert packed.counts()["validation"] == dict.fromkeys(CLASSES, 2)
    own = load_splits(DataConfig("class_folders", {"path": str(source), "validation": 6}))
    assert sorted(numbers_of(splits.validation)) == sorted(numbers_of(own.validation))
    assert sorted(numbers_of(splits.train)) == sorted(numbers_of(own.train))
    with pytest.raises(ConfigError, match="leave out --data-args validation"):
        load(tmp_path / "packed", validation=3)


@pytest.mark.parametrize("suffix", ["tar", "tgz"])
def test_a_tar_file_packs_like_its_folder(source, tmp_path, suffix):
    archive = tmp_path / f"all.{suffix}"
    with tarfile.open(archive, "w:gz" if suffix == "tgz" else "w") as tar:
        tar.add(source, "all")
    pack(source, tmp_path / "a", shards=2, workers=1)
    pack(archive, tmp_path / "b", shards=2, workers=1)
    names = [file.name for file in (tmp_path / "a").glob("*.tfrecord")]
    assert len(names) == 2
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


def test_folders_for_validation_become_shards_of_their_own(source, tmp_path):
    (tmp_path / "split").mkdir()
    source.rename(tmp_path / "split" / "train")
    for name in CLASSES:
        (tmp_path / "split" / "val" / name).mkdir(parents=True)
    for number in (3, 14, 25):
        file = f"{CLASSES[number // 10]}/{number:02}.png"
        (tmp_path / "split" / "train" / file).rename(tmp_path / "split" / "val" / file)
    with pytest.raises(ConfigError, match="has images for validation already: leave out --validation"):
        pack(tmp_path / "split", tmp_path / "packed", validation=3)
    pack(tmp_path / "split", tmp_path / "packed", workers=1)
    splits = load(tmp_path / "packed")
    assert sorted(numbers_of(splits.validation)) == [3, 14, 25]
    assert splits.train.size == 27


def test_shards_are_as_large_as_asked_for(tmp_path):
    for number in range(40):
        file = tmp_path / "source" / CLASSES[number % 2] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(100_000))
    packed = pack(tmp_path / "source", tmp_path / "packed", shard_mb=1, workers=2)
    assert [shard.records for shard in packed.shards] == [10] * 4
    assert all(1e6 < shard.bytes < 1.01e6 for shard in packed.shards)


def test_progress_ends_at_all_there_is(source, tmp_path):
    seen = []
    pack(source, tmp_path / "packed", shards=5, workers=2, progress=seen.append)
    size = sum(len(picture(number)) for number in range(30))
    assert seen[-1] == PackProgress(5, 5, size, size)
    assert all(a.bytes <= b.bytes for a, b in itertools.pairwise(seen) if a.shards == b.shards)


# Taking up again


def test_a_rerun_keeps_what_is_whole_and_makes_the_rest(source, tmp_path):
    dest = tmp_path / "packed"
    pack(source, dest, shards=4, workers=1)
    first = files_of(dest)
    shards = sorted(dest.glob("*.tfrecord"))
    shards[0].unlink()
    shards[1].write_bytes(first[shards[1].name][:-3])
    flip_byte(shards[2], 200)
    kept = shards[3].stat()
    pack(source, dest, shards=4, workers=1)
    again = files_of(dest)
    assert all(again[shard.name] == first[shard.name] for shard in shards)
    assert again["index.json"] == first["index.json"]
    assert (shards[3].stat().st_ino, shards[3].stat().st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)


def test_an_index_that_is_lost_is_made_again(source, tmp_path):
    dest = tmp_path / "packed"
    pack(source, dest, shards=2, workers=1)
    first = files_of(dest)
    (dest / "index.json").write_text("{")
    with pytest.raises(DataError, match=r"The index of .* is damaged .*: remove index\.json and run data pack again"):
        load(dest)
    elsewhere = first["index.json"].replace(b"train-00000-of-00002", b"../train-00000-of-00002")
    (dest / "index.json").write_bytes(elsewhere)
    with pytest.raises(DataError, match=r"the shard '\.\./train-00000-of-00002\.tfrecord' is no file in it"):
        load(dest)
    (dest / "index.json").unlink()
    with pytest.raises(DataError, match="packing was not finished: run data pack again"):
        load(dest)
    pack(source, dest, shards=2, workers=1)
    assert files_of(dest)["index.json"] == first["index.json"]


def test_an_image_that_cannot_be_read_ends_packing_until_it_can(source, tmp_path, monkeypatch):
    dest, image = tmp_path / "packed", source / "bee" / "14.png"
    from hvdtrain.data.packing import pack as packing

    scan = packing.scan

    def scan_then_cut(path):
        found = scan(path)
        image.write_bytes(picture(14)[:-10])
        return found

    monkeypatch.setattr(packing, "scan", scan_then_cut)
    with pytest.raises(DataError, match=r"bee/14\.png .* became shorter while it was packed"):
        pack(source, dest, shards=30, workers=1)
    assert not (dest / "index.json").exists()
    assert not list(dest.glob("*.draft"))
    image.write_bytes(picture(14))
    monkeypatch.setattr(packing, "scan", scan)
    pack(source, dest, shards=30, workers=2)


def test_a_worker_that_is_killed_is_told(tmp_path):
    for number in range(30):
        file = tmp_path / "source" / CLASSES[number % 2] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(2_000_000))

    def kill(_):
        for worker in multiprocessing.active_children():
            worker.kill()

    with pytest.raises(DataError, match="A worker of data pack was killed"):
        pack(tmp_path / "source", tmp_path / "dest", shards=30, workers=1, progress=kill)
    assert pack(tmp_path / "source", tmp_path / "dest", shards=30, workers=1).counts()["train"]["ant"] == 15


# What is refused


def test_a_folder_that_holds_something_else_is_left_alone(source, tmp_path):
    dest = tmp_path / "dest"
    dest.mkdir()
    (dest / "precious").write_text("mine")
    with pytest.raises(DataError, match=r"holds something else \(precious\): nothing in it is overwritten"):
        pack(source, dest)
    assert files_of(dest) == {"precious": b"mine"}


@pytest.mark.parametrize("change", ["shards", "validation", "source"])
def test_a_folder_that_was_packed_otherwise_is_left_alone(source, tmp_path, change):
    dest = tmp_path / "dest"
    options = {"shards": 2, "validation": 0, "workers": 1}
    pack(source, dest, **options)
    first = files_of(dest)
    if change == "source":
        (source / "ant" / "05.png").unlink()
    else:
        options[change] = 3
    with pytest.raises(DataError, match="was packed from other images or with other options") as refused:
        pack(source, dest, **options)
    assert "name a new folder, or remove this one" in str(refused.value)
    assert files_of(dest) == first


def test_a_file_in_the_folders_place_is_refused(source, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match="file is a file: data pack needs a new or empty folder"):
        pack(source, tmp_path / "file")
    with pytest.raises(DataError, match="cannot be written into: Not a directory"):
        pack(source, tmp_path / "file" / "dest")
    assert (tmp_path / "file").read_text() == "mine"


def test_two_at_a_time_are_one_too_many(source, tmp_path):
    refused = []

    def second(_):
        if not refused:
            with pytest.raises(DataError, match="Another data pack is writing into") as raised:
                pack(source, tmp_path / "dest", shards=2, workers=1)
            refused.append(raised)

    pack(source, tmp_path / "dest", shards=2, workers=1, progress=second)
    assert refused
    assert load(tmp_path / "dest").train.size == 27


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shards": -1}, "Received: -1, 0, 0 and 128"),
        ({"shard_mb": 0}, "--shard-mb of at least 1"),
        ({"shards": 31}, "--shards 31 is more than the 30 training images"),
        ({"validation": 30}, "--validation 30 would leave none of the 30 images"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_anything_is_written(source, tmp_path, options, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        pack(source, tmp_path / "dest", **options)
    assert not (tmp_path / "dest").exists()


def test_a_shard_of_another_size_is_refused_by_the_loader(source, tmp_path):
    pack(source, tmp_path / "packed", shards=2, workers=1)
    shard = tmp_path / "packed" / "train-00001-of-00002.tfrecord"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"00001-of-00002.tfrecord has {size - 1} bytes instead of {size}"):
        load(tmp_path / "packed")
    shard.unlink()
    with pytest.raises(DataError, match=r"00001-of-00002\.tfrecord is missing: run data pack again"):
        load(tmp_path / "packed")


def test_a_packed_folder_that_may_not_be_read_is_named(source, tmp_path):
    packed = tmp_path / "packed"
    pack(source, packed, shards=2, workers=1)
    shard = packed / "train-00000-of-00002.tfrecord"
    for path, named in (
        (shard, shard),
        (packed / "index.json", packed / "index.json"),
        (packed / "index.npz", packed / "index.npz"),
        (packed, packed / "packing.json"),
    ):
        with (
            closed(path),
            pytest.raises(DataError, match=rf"^{re.escape(str(named))} cannot be read: Permission denied"),
        ):
            load(packed)


def test_tfrecord_files_that_may_not_be_read_are_named(source, tmp_path):
    pack(source, tmp_path / "packed", shards=1, workers=1)
    (tmp_path / "plain/inner").mkdir(parents=True)
    for name in ("features.yaml", "train-00000-of-00001.tfrecord"):
        shutil.copy(tmp_path / "packed" / name, tmp_path / "plain")
    inner = tmp_path / "plain/inner"
    with closed(inner), pytest.raises(DataError, match=rf"^{inner} cannot be read: Permission denied"):
        load(tmp_path / "plain")
    file = tmp_path / "plain/train-00000-of-00001.tfrecord"
    with closed(file), pytest.raises(DataError, match=rf"^{file} cannot be read: Permission denied"):
        load(file)


# The command line


def test_plain_progress_is_a_line_for_each_tenth(capsys):
    now = 0.0
    shown = data_pack._Lines(lambda: now)
    for step in range(101):
        now += 0.01
        shown.show(PackProgress(step // 50, 2, step * 10**6, 100 * 10**6))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("packed 100%  2 of 2 files")
    now += 10
    shown.show(PackProgress(2, 2, 10**8, 10**8))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_progress_of_empty_images_is_that_of_their_files(capsys):
    shown = data_pack._Lines(lambda: 0.0)
    for done in range(3):
        shown.show(PackProgress(done, 2, 0, 0))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["50%", "100%"]


def test_a_description_is_written_whole_or_not_at_all(source, tmp_path, monkeypatch):
    def full(path, text, **_):
        path.write_bytes(text[:20].encode())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            features.write_description(tmp_path / "features.yaml", features.Description({}, "image", "label"))
        with pytest.raises(DataError, match="packed cannot be written into: No space left on device"):
            pack(source, tmp_path / "packed", shards=1, workers=1)
    assert not (tmp_path / "features.yaml").exists()


def test_the_index_is_plain_json(source, tmp_path):
    pack(source, tmp_path / "packed", shards=2, workers=1)
    index = json.loads((tmp_path / "packed" / "index.json").read_text())
    assert index["classes"] == list(CLASSES)
    assert index["records"] == {"train": dict.fromkeys(CLASSES, 10)}
    sizes = [(tmp_path / "packed" / shard["file"]).stat().st_size for shard in index["shards"]]
    assert [shard["bytes"] for shard in index["shards"]] == sizes
