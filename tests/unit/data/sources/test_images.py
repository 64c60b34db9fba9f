"""Class folders of images, as folders and within tar files."""

import io
import os
import tarfile

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.sources.class_folders import scan
from hvdtrain.data.sources.images import ImageSource, load
from tests.unit.file_modes import closed
from tests.unit.images import encoded, picture, tar_of, write_folders


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("HVDTRAIN_CACHE", str(folder))
    return folder


def all_of(source):
    return tuple(part.numpy() for part in source.gather(tf.range(source.size, dtype=tf.int64)))


def test_a_folder_and_its_tar_files_give_the_same(tmp_path):
    write_folders(tmp_path / "data")
    forms = [tmp_path / "data"]
    for mode, suffix in (("w", "tar"), ("w:gz", "tar.gz"), ("w:bz2", "tar.bz2"), ("w:xz", "tar.xz")):
        forms.append(tar_of(tmp_path / "data", tmp_path / f"data.{suffix}", mode))
    for form in forms:
        found = scan(form)
        images, labels = all_of(ImageSource(found.blobs, found.labels, "mine"))
        assert found.classes == ["ant", "bee"]
        assert labels.tolist() == [0] * 5 + [1] * 5
        for number, image in enumerate(images):
            assert (image == picture(number)).all()


def test_what_is_unpacked_is_kept_and_made_anew_when_it_changes(tmp_path, cache):
    write_folders(tmp_path / "data")
    path = tar_of(tmp_path / "data", tmp_path / "data.tar.gz")
    scan(path)
    (unpacked,) = (file for file in cache.iterdir() if not file.name.endswith(".lock"))
    before = unpacked.stat().st_mtime_ns
    scan(path)
    assert unpacked.stat().st_mtime_ns == before
    write_folders(tmp_path / "data", classes=("cat",))
    tar_of(tmp_path / "data", path)
    os.utime(path, (1, 1))
    assert scan(path).classes == ["ant", "bee", "cat"]


@pytest.mark.parametrize("held", ["val", "validation", "test"])
def test_folders_for_training_and_validation(tmp_path, held):
    write_folders(tmp_path, prefix="data/train")
    write_folders(tmp_path, prefix=f"data/{held}", each=2)
    splits = load(path=str(tmp_path / "data"))
    assert (splits.train.size, splits.validation.size, splits.classes) == (10, 4, 2)
    assert splits.validation.describe(0).endswith(f"{held}/ant/000.png")
    with pytest.raises(ConfigError, match="leave out --data-args validation"):
        load(path=str(tmp_path / "data"), validation=3)


def test_what_is_held_out_is_stratified_and_never_trained_on(tmp_path):
    write_folders(tmp_path / "data", each=20)
    splits = load(path=str(tmp_path / "data"), validation=10)
    names = [[part.describe(n) for n in range(part.size)] for part in (splits.train, splits.validation)]
    assert not set(names[0]) & set(names[1])
    assert len(set(names[0]) | set(names[1])) == 40
    assert np.bincount(all_of(splits.validation)[1]).tolist() == [5, 5]
    images, _ = splits.finish(*splits.train.gather(tf.constant([0], tf.int64)))
    assert images.dtype == tf.float32
    assert 0.0 <= float(tf.reduce_min(images)) < float(tf.reduce_max(images)) <= 1.0


def test_sizes_and_channels(tmp_path):
    write_folders(tmp_path / "data", classes=("ant",))
    write_folders(tmp_path / "data", classes=("bee",), size=13)
    found = scan(tmp_path / "data")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"is not \[8, 8, 3\] in size"):
        all_of(ImageSource(found.blobs, found.labels, "mine"))
    images, _ = all_of(ImageSource(found.blobs, found.labels, "mine", size=6, channels=1))
    assert images.shape == (10, 6, 6, 1)
    with pytest.raises(ConfigError, match="channels=2"):
        load(path=str(tmp_path / "data"), channels=2)


def refused(path, *words, **arguments):
    with pytest.raises(DataError) as failure:
        load(path=str(path), **arguments)
    for word in words:
        assert word in str(failure.value)


def test_what_cannot_be_used_is_refused_by_name(tmp_path):
    refused(tmp_path / "missing", "There is no", "missing", "--data-args path")
    refused("", "--data-args path PATH")
    (tmp_path / "empty/ant").mkdir(parents=True)
    refused(tmp_path / "empty", "empty", "holds no images")
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat/0.png").write_bytes(encoded(picture(0)))
    refused(tmp_path / "flat", "0.png outside of any class folder")
    (tmp_path / "notes.txt").write_text("no images")
    refused(tmp_path / "notes.txt", "neither a folder of class folders nor a tar file")
    write_folders(tmp_path / "few", each=1)
    refused(tmp_path / "few", "2 samples", "cannot be held out", validation=2)
    (tmp_path / "bad/ant").mkdir(parents=True)
    (tmp_path / "bad/ant/0.png").write_bytes(b"no image")
    (tmp_path / "bad/ant/1.png").write_bytes(encoded(picture(0)))
    refused(tmp_path / "bad", "ant/0.png", "cannot be decoded")
    write_folders(tmp_path, prefix="odd/train", classes=("ant",))
    write_folders(tmp_path, prefix="odd/val", classes=("bee",))
    refused(tmp_path / "odd", "the class 'bee' for validation, but not for training")
    write_folders(tmp_path, prefix="only/val")
    write_folders(tmp_path, prefix="only/test")
    refused(tmp_path / "only", "no folder for training")


@pytest.mark.parametrize("name", ["../evil.png", "ant/../../evil.png", "/evil.png"])
def test_members_outside_of_a_tar_file(tmp_path, name):
    (tmp_path / "image.png").write_bytes(encoded(picture(0)))
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        archive.add(tmp_path / "image.png", "ant/0.png")
        info = archive.gettarinfo(tmp_path / "image.png")
        info.name = name
        with open(tmp_path / "image.png", "rb") as file:
            archive.addfile(info, file)
    refused(tmp_path / "data.tar", "data.tar", "outside of its own folder", name)


def test_damaged_archives(tmp_path):
    write_folders(tmp_path / "data")
    whole = tar_of(tmp_path / "data", tmp_path / "data.tar.gz").read_bytes()
    (tmp_path / "short.tar.gz").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "short.tar.gz", "short.tar.gz", "damaged")
    (tmp_path / "no.tar").write_bytes(b"x" * 2000)
    refused(tmp_path / "no.tar", "no.tar", "not a tar file")
    (tmp_path / "no.tar.gz").write_bytes(b"x" * 2000)
    refused(tmp_path / "no.tar.gz", "no.tar.gz", "damaged")


def test_a_tar_file_that_is_damaged_or_cut_off_is_refused(tmp_path):
    write_folders(tmp_path / "data")
    whole = tar_of(tmp_path / "data", tmp_path / "data.tar", "w").read_bytes()
    with tarfile.open(tmp_path / "data.tar") as archive:
        (header,) = (member.offset for member in archive if member.name.endswith("bee/002.png"))
    for name, content in (
        ("header", whole[:header] + b"?" + whole[header + 1 :]),
        ("between", whole[:header]),
        ("within", whole[: header + 600]),
        ("end", whole[: len(whole) // 10240 * 10240 - 10240]),
    ):
        (tmp_path / f"{name}.tar").write_bytes(content)
        refused(tmp_path / f"{name}.tar", f"{name}.tar is not a tar file, or damaged")
    with pytest.raises(DataError, match=r"its end is missing, and what comes after data/bee/\d+\.png cannot be read"):
        scan(tmp_path / "header.tar")


def tar_with(path, members):
    """Write a tar file of members: bytes are files, "-> name" symbolic links, "= name" hard ones."""
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
            else:
                kind, member.linkname = content.split()
                member.type = tarfile.SYMTYPE if kind == "->" else tarfile.LNKTYPE
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return path


def test_links_within_a_tar_file_are_followed(tmp_path):
    files = {f"./data/ant/{number}.png": encoded(picture(number)) for number in range(2)}
    links = {"./data/bee/0.png": "-> ../ant/0.png", "./data/bee/1.png": "= data/ant/1.png"}
    more = {"./data/bee/2.png": "-> 0.png", "./data/README": "-> notes.txt", "./data/notes.txt": b"", "./.new": "-> no"}
    found = scan(tar_with(tmp_path / "data.tar", more | links | files))
    assert found.names == ["ant/0.png", "ant/1.png", "bee/0.png", "bee/1.png", "bee/2.png"]
    images, _ = all_of(ImageSource(found.blobs, found.labels, "mine"))
    for number, image in zip((0, 1, 0, 1, 0), images, strict=True):
        assert (image == picture(number)).all()


@pytest.mark.parametrize("link", ["-> ../../other/0.png", "-> 1.png", "= data/gone.png", "-> /data/ant/0.png", "-> ."])
def test_links_that_lead_to_no_file_of_a_tar_file_are_refused(tmp_path, link):
    path = tar_with(tmp_path / "data.tar", {"data/ant/0.png": encoded(picture(0)), "data/bee/1.png": link})
    refused(path, f"data/bee/1.png is a link to {link.split()[1]}, which is not a file in it", "tar --dereference")


def test_folders_that_links_lead_to_are_searched_once_each(tmp_path):
    write_folders(tmp_path / "data", classes=("ant",))
    write_folders(tmp_path / "elsewhere", classes=("bee",))
    (tmp_path / "data/bee").symlink_to(tmp_path / "elsewhere/bee")
    (tmp_path / "data/ant/up").symlink_to("..")
    (tmp_path / "data/bee/same").symlink_to(".")
    names = scan(tmp_path / "data").names
    assert names == [f"{name}/{number:03}.png" for name in ("ant", "bee") for number in range(5)]


def test_copies_have_one_fingerprint_wherever_they_are(tmp_path):
    folder = tmp_path / "data"
    write_folders(folder)
    (tmp_path / "there").mkdir()
    forms = [folder, *(tar_of(folder, tmp_path / name, "w:gz") for name in ("data.tar.gz", "there/copy.tar.gz"))]
    os.utime(forms[2], (1, 1))

    def marks():
        return {load(path=str(form)).train.fingerprint() for form in forms}

    before = marks()
    assert len(before) == 1
    write_folders(folder, classes=("cat",))
    forms = [folder]
    assert marks().isdisjoint(before)
    (folder / "cat/000.png").rename(folder / "cat/999.png")
    assert len(marks() | {load(path=str(tar_of(folder, tmp_path / "new.tar", "w"))).train.fingerprint()}) == 1


def test_what_may_not_be_read_is_named(tmp_path, cache):
    folder = tmp_path / "data"
    write_folders(folder)
    archive = tar_of(folder, tmp_path / "data.tar", "w")
    packed = tar_of(folder, tmp_path / "data.tar.gz")
    with closed(folder / "ant"):
        refused(folder, f"{folder / 'ant'} cannot be read: Permission denied.")
        refused(folder / "ant" / "x", f"{folder / 'ant' / 'x'} cannot be read: Permission denied.")
    with closed(archive):
        refused(archive, f"{archive} cannot be read: Permission denied.")
    with closed(cache):
        refused(packed, f"The cache {cache} cannot be written: Permission denied. Set HVDTRAIN_CACHE.")
    (folder / "ant/gone.png").symlink_to("nowhere")
    refused(folder, f"{folder / 'ant/gone.png'} cannot be read: No such file")


def test_data_are_found_in_the_folder_of_the_environment(tmp_path, monkeypatch):
    write_folders(tmp_path / "here/data")
    monkeypatch.setenv("HVDTRAIN_DATA", str(tmp_path / "here"))
    assert load(path="data").train.size == 9
    refused("other", "nor is it in HVDTRAIN_DATA")
