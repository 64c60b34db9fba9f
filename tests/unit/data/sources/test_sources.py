import gzip
import io
import os
import pickle
import re
import struct
import tarfile
import warnings
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.files.locations import DATA_VARIABLE
from hvdtrain.data.registry import load_splits


def load(source, path, **arguments):
    return load_splits(DataConfig(source, {"path": str(path), **arguments}))


def arrays(source, splits=None):
    """All samples of a source, after what `splits` does to them last."""
    elements = source.gather(tf.range(source.size))
    if splits is not None and splits.finish is not None:
        elements = splits.finish(*elements)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), elements)


def refused(source, path, cause, error=DataError, **arguments):
    with pytest.raises(error, match=re.escape(cause)):
        load(source, path, **arguments)


def random(*shape, seed=0):
    return np.random.default_rng(seed).random(shape, np.float32)


def parts_of(splits, index=1):
    return arrays(splits.train)[index].tolist(), arrays(splits.validation)[index].tolist()


# -- arrays --


X, Y = random(20, 3), np.arange(20) % 4


@pytest.mark.parametrize(
    ("inputs", "targets"), [("x", "y"), ("inputs", "targets"), ("inputs", "y"), ("x_train", "y_train")]
)
def test_arrays_of_an_npz_file_are_all_used_once(tmp_path, inputs, targets):
    np.savez(tmp_path / "a.npz", **{inputs: X, targets: np.arange(20)})
    splits = load("arrays", tmp_path / "a.npz", validation=5)
    train, held = arrays(splits.train), arrays(splits.validation)
    assert (len(train[0]), len(held[0])) == (15, 5)
    assert sorted([*train[1], *held[1]]) == list(range(20))
    for x, y in (train, held):
        assert (x == X[y]).all()  # inputs and targets stayed together
    assert (splits.sample_shape, splits.classes, splits.finish) == ((3,), 20, None)


def test_held_out_samples_are_a_tenth_that_has_its_share_of_every_label(tmp_path):
    np.savez(tmp_path / "a.npz", x=random(400, 2), y=np.arange(400) % 4)
    first, again = (load("arrays", tmp_path / "a.npz") for _ in range(2))
    assert np.bincount(arrays(first.validation)[1]).tolist() == [10] * 4
    assert (arrays(first.validation)[0] == arrays(again.validation)[0]).all()


def test_keras_mnist_file_is_read_as_it_is(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4), np.uint8)
    labels = np.array([0, 1, 2, 0, 1, 2], np.uint8)
    np.savez(tmp_path / "mnist.npz", x_train=pixels, y_train=labels, x_test=pixels[:2], y_test=labels[:2])
    splits = load("arrays", tmp_path / "mnist.npz")
    assert splits.train.spec[0].dtype == tf.uint8  # augmentation works on bytes
    images, targets = arrays(splits.train, splits)
    np.testing.assert_allclose(images, pixels[..., np.newaxis] / 255.0, rtol=1e-6)
    assert targets.tolist() == labels.tolist()
    assert splits.validation.size == 2
    assert (splits.sample_shape, splits.classes) == ((4, 4, 1), 3)


def test_a_folder_of_npy_files_with_weights(tmp_path):
    for name, array in {"x": X, "y": Y, "sample_weight": np.arange(20.0), "x_val": X[:2], "y_val": Y[:2]}.items():
        np.save(tmp_path / f"{name}.npy", array)
    splits = load("arrays", tmp_path)
    assert arrays(splits.train)[2].tolist() == list(range(20))
    assert splits.validation.size == 2


def test_bytes_that_are_no_images_stay_bytes(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.full((20, 7), 9, np.uint8), y=random(20, 2))
    splits = load("arrays", tmp_path / "a.npz")
    assert splits.finish is None
    assert arrays(splits.train)[0].dtype == np.uint8
    assert splits.classes is None  # numbers are no labels


def test_arrays_that_nobody_uses_are_told_of(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", x=X, y=Y, sample_weights=Y)
    with pytest.warns(UserWarning, match="holds arrays that are not used: sample_weights"):
        load("arrays", tmp_path / "a.npz")
    for name, value in (("RANK", 1), ("SIZE", 2), ("LOCAL_RANK", 1), ("LOCAL_SIZE", 2)):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the first rank says it for all
        load("arrays", tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ({"x": X}, "has x, but no y."),
        ({"x_train": X, "targets_train": Y, "y_test": Y}, "has y_test, but no x_test."),
        (
            {"images": X, "y_other": Y},
            "needs the arrays x and y (or inputs and targets, or x_train and y_train). It holds: images, y_other.",
        ),
        ({"x": X, "y": Y[:7]}, "differ in length: 7, 20 samples"),
        ({"x": X[:0], "y": Y[:0]}, "holds no samples"),
        (
            {"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y},
            "are ('float32 [3]', 'int32 []'); those of",
        ),
        ({"x": np.array([{}] * 3), "y": Y[:3]}, "The array x of"),
        ({"x": X[:1], "y": Y[:1]}, "Of the 1 samples of"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, content, cause):
    np.savez(tmp_path / "a.npz", **content)
    refused("arrays", tmp_path / "a.npz", cause)


def test_labels_beyond_the_classes_are_named(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    assert load("arrays", tmp_path / "a.npz", classes=9).classes == 9
    refused("arrays", tmp_path / "a.npz", "a.npz, sample 3: the label 3 is not one of 3 classes", classes=3)
    np.savez(tmp_path / "b.npz", x=X, y=X)
    refused("arrays", tmp_path / "b.npz", "classes is for integer labels [samples]", classes=3)


def test_files_that_hold_no_arrays_are_refused(tmp_path):
    (tmp_path / "empty.npz").touch()
    refused("arrays", tmp_path / "empty.npz", "empty.npz is no file of NumPy arrays, or damaged")
    (tmp_path / "text.npz").write_text("a,b\n1,2\n")
    refused("arrays", tmp_path / "text.npz", "text.npz is no file of NumPy arrays, or damaged")
    np.savez(tmp_path / "whole.npz", x=X, y=Y)
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    refused("arrays", tmp_path / "cut.npz", "cut.npz is no file of NumPy arrays, or damaged")
    place = whole.index(X.tobytes())
    (tmp_path / "changed.npz").write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
    refused("arrays", tmp_path / "changed.npz", "The array x of")
    np.save(tmp_path / "one.npy", X)
    refused("arrays", tmp_path / "one.npy", "holds one array")
    (tmp_path / "folder").mkdir()
    refused("arrays", tmp_path / "folder", "It holds: none.")
    (tmp_path / "folder" / "x.npy").mkdir()
    refused("arrays", tmp_path / "folder", "x.npy cannot be read: Is a directory.")


def test_a_number_to_hold_out_does_not_go_with_samples_for_validation(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=X, y_train=Y, x_test=X, y_test=Y)
    refused(
        "arrays",
        tmp_path / "a.npz",
        "has samples for validation: leave out --data-args validation",
        ConfigError,
        validation=3,
    )


@pytest.mark.parametrize("source", ["arrays", "idx", "cifar"])
def test_a_path_that_is_not_there_is_named(tmp_path, source):
    refused(source, tmp_path / "nothing", f"There is no {tmp_path / 'nothing'}")
    refused(source, "", "--data-args path PATH")


# -- idx --


def idx(array, code=8):
    return bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


PIXELS = np.random.default_rng(1).integers(0, 256, (30, 5, 4), np.uint8)
LABELS = (np.arange(30) % 10).astype(np.uint8)


def write_idx(folder, name, images=PIXELS, labels=LABELS, join="-", packed=""):
    opener = gzip.open if packed else open
    for kind, array in ((f"images{join}idx3", images), (f"labels{join}idx1", labels)):
        with opener(folder / f"{name}-{kind}-ubyte{packed}", "wb") as file:
            file.write(idx(array))


@pytest.mark.parametrize(("test", "join", "packed"), [("t10k", "-", ""), ("test", ".", ""), ("t10k", "-", ".gz")])
def test_idx_files_in_all_their_spellings(tmp_path, test, join, packed):
    write_idx(tmp_path, "train", join=join, packed=packed)
    write_idx(tmp_path, test, PIXELS[:4], LABELS[:4], join=join, packed=packed)
    splits = load("idx", tmp_path)
    images, labels = arrays(splits.train, splits)
    np.testing.assert_allclose(images, PIXELS[..., np.newaxis] / 255.0, rtol=1e-6)
    assert labels.tolist() == LABELS.tolist()
    assert parts_of(splits)[1] == LABELS[:4].tolist()
    assert (splits.sample_shape, splits.classes) == ((5, 4, 1), 10)


def test_idx_without_a_test_part_holds_samples_out(tmp_path):
    write_idx(tmp_path, "emnist-letters-train", labels=LABELS + 1)
    splits = load("idx", tmp_path, prefix="emnist-letters-", validation=10)
    assert np.bincount(arrays(splits.validation)[1]).tolist() == [0] + [1] * 10
    assert splits.classes == 11


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("images-idx3", b"", "is no idx file: it begins with nothing."),
        ("images-idx3", b"\x1f\x8b\x08\x00", "is no idx file: it begins with 1f 8b 08 00."),
        ("images-idx3", idx(LABELS), "with 3 dims (00 00 08 03). It begins with 00 00 08 01."),
        ("labels-idx1", idx(PIXELS), "with 1 dims (00 00 08 01). It begins with 00 00 08 03."),
        ("images-idx3", idx(PIXELS, code=13), "It begins with 00 00 0d 03."),
        ("images-idx3", idx(PIXELS)[:-1], "holds 615 bytes; its header promises 616 for [30, 5, 4]."),
        ("images-idx3", idx(PIXELS) + b"0", "holds 617 bytes; its header promises 616 for [30, 5, 4]."),
        ("images-idx3", idx(PIXELS)[:9], "holds 9 bytes; its header promises"),
        ("labels-idx1", idx(LABELS[:-1]), "holds 30 images; "),
        ("images-idx3", idx(PIXELS[:0]), "holds 0 images; "),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, name, content, cause):
    write_idx(tmp_path, "train")
    file = tmp_path / f"train-{name}-ubyte"
    file.write_bytes(content)
    refused("idx", tmp_path, cause)
    refused("idx", tmp_path, str(file))


def test_missing_and_unreadable_idx_files_are_named(tmp_path):
    refused("idx", tmp_path, "holds no train-images-idx3-ubyte, nor with .gz")
    write_idx(tmp_path, "train")
    refused("idx", tmp_path / "train-images-idx3-ubyte", "takes the folder with train-images-idx3-ubyte")
    refused("idx", tmp_path, "holds no letters-train-images-idx3-ubyte", prefix="letters-")
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.unlink()
    refused("idx", tmp_path, "holds train-images-idx3-ubyte, but no train-labels-idx1-ubyte.")
    labels.mkdir()
    refused("idx", tmp_path, f"{labels} cannot be read: Is a directory.")


def test_a_cut_off_compressed_idx_file_is_named(tmp_path):
    write_idx(tmp_path, "train", packed=".gz")
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-20])
    refused("idx", tmp_path, f"{file} is damaged")
    file.write_bytes(idx(PIXELS))
    refused("idx", tmp_path, f"{file} is damaged")


def test_empty_idx_files_and_labels_out_of_range_are_named(tmp_path):
    write_idx(tmp_path, "train", PIXELS[:0], LABELS[:0])
    refused("idx", tmp_path, "holds no images")
    write_idx(tmp_path, "train")
    refused("idx", tmp_path, "train-labels-idx1-ubyte, label 8: the label 8 is not one of 8 classes", classes=8)


def test_idx_parts_of_other_sizes_are_refused(tmp_path):
    write_idx(tmp_path, "train")
    write_idx(tmp_path, "t10k", PIXELS[:, :4])
    refused("idx", tmp_path, "both must be alike")


# -- CIFAR --


def cifar_samples(count, classes=10, seed=0):
    """Images [count, 32, 32, 3] and labels."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 32, 32, 3), np.uint8), np.arange(count) % classes


def planes(images):
    return images.transpose(0, 3, 1, 2).reshape(len(images), 3072)


def binary(images, *labels):
    return np.concatenate([np.array(labels, np.uint8).T, planes(images)], axis=1).tobytes()


class Python2Pickler(pickle._Pickler):
    """Pickles as Python 2 did when CIFAR was published: bytes are its `str`."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_bytes(self, thing):
        self.write(pickle.BINSTRING + struct.pack("<i", len(thing)) + thing)
        self.memoize(thing)

    dispatch[bytes] = save_bytes


def pickled(images, protocol=2, by_python2=True, **labels):
    content = {b"data": planes(images), **{name.encode(): list(map(int, values)) for name, values in labels.items()}}
    content |= {b"batch_label": b"testing batch", b"filenames": [b"a.png"] * len(images)}
    if not by_python2:
        return pickle.dumps(content, protocol)
    file = io.BytesIO()
    Python2Pickler(file, 2).dump(content)
    return file.getvalue()


IMAGES, NUMBERS = cifar_samples(50)
FIVE = [slice(10 * i, 10 * i + 10) for i in range(5)]


def cifar10_files(kind):
    if kind == "binary":
        named = {f"data_batch_{i}.bin": binary(IMAGES[s], NUMBERS[s]) for i, s in enumerate(FIVE, 1)}
        return named | {"test_batch.bin": binary(IMAGES[:3], NUMBERS[:3])}
    named = {f"data_batch_{i}": pickled(IMAGES[s], labels=NUMBERS[s]) for i, s in enumerate(FIVE, 1)}
    return named | {"test_batch": pickled(IMAGES[:3], labels=NUMBERS[:3])}


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def packed(path, files, folder="cifar-10-batches-py"):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in {"readme.html": b"", **files}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("kind", ["binary", "python"])
@pytest.mark.parametrize("place", ["folder", "inner", "tar"])
def test_cifar10_as_it_is_published(tmp_path, kind, place):
    files = cifar10_files(kind)
    if place == "tar":
        path = packed(tmp_path / "cifar-10.tar.gz", files)
    else:
        path = write(tmp_path / "cifar-10-batches", files) if place == "folder" else tmp_path
        write(tmp_path / "cifar-10-batches", files)
    splits = load("cifar", path)
    assert splits.train.spec[0].dtype == tf.uint8
    assert (arrays(splits.train)[0] == IMAGES).all()
    images, labels = arrays(splits.train, splits)
    np.testing.assert_allclose(images, IMAGES / 255.0, rtol=1e-6)
    assert labels.tolist() == NUMBERS.tolist()
    assert (arrays(splits.validation)[0] == IMAGES[:3]).all()
    assert (splits.sample_shape, splits.classes) == ((32, 32, 3), 10)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_batches_that_were_pickled_again_are_read_too(tmp_path, protocol):
    files = {
        f"data_batch_{i}": pickled(IMAGES[s], protocol, by_python2=False, labels=NUMBERS[s])
        for i, s in enumerate(FIVE, 1)
    }
    splits = load("cifar", write(tmp_path, files), validation=10)
    train, held = arrays(splits.train), arrays(splits.validation)
    assert np.bincount(held[1]).tolist() == [1] * 10
    together = np.concatenate([train[0], held[0]])
    assert sorted(image.tobytes() for image in together) == sorted(image.tobytes() for image in IMAGES)


@pytest.mark.parametrize(("labels", "classes"), [("fine", 100), ("coarse", 20)])
@pytest.mark.parametrize("kind", ["binary", "python"])
def test_cifar100_has_two_kinds_of_labels(tmp_path, kind, labels, classes):
    fine, coarse = np.arange(50) * 2, np.arange(50) % 20
    if kind == "binary":
        files = {"train.bin": binary(IMAGES, coarse, fine), "test.bin": binary(IMAGES[:1], coarse[:1], fine[:1])}
    else:
        files = {"train": pickled(IMAGES, fine_labels=fine, coarse_labels=coarse)}
        files["test"] = pickled(IMAGES[:1], fine_labels=fine[:1], coarse_labels=coarse[:1])
    splits = load("cifar", write(tmp_path, files), labels=labels)
    assert arrays(splits.train)[1].tolist() == {"fine": fine, "coarse": coarse}[labels].tolist()
    assert (arrays(splits.train)[0] == IMAGES).all()
    assert splits.classes == classes


def test_cifar10_has_no_coarse_labels(tmp_path):
    refused(
        "cifar",
        write(tmp_path, cifar10_files("binary")),
        "CIFAR-10 has fine labels. Received: labels='coarse'",
        ConfigError,
        labels="coarse",
    )


class Shell:
    """What is unpickled by running a command."""

    def __init__(self, command):
        self._command = command

    def __reduce__(self):
        return os.system, (self._command,)


@pytest.mark.parametrize("at", ["whole", "data", "labels"])
def test_a_pickle_that_would_run_a_command_does_not(tmp_path, at):
    trace = tmp_path / "was_here"
    evil = Shell(f"touch {trace}")
    content = {b"data": planes(IMAGES[:10]), b"labels": [0] * 10}
    if at == "whole":
        content = evil
    else:
        content[at.encode()] = evil
    data = pickle.dumps(content)
    pickle.loads(data)
    assert trace.exists()  # it is what it is said to be
    trace.unlink()
    folder = write(tmp_path / "files", cifar10_files("python") | {"data_batch_3": data})
    refused("cifar", folder, f"{folder}, data_batch_3 asks for posix.system, which no arrays need")
    assert not trace.exists()


@pytest.mark.parametrize(
    "line", [b"cbuiltins\neval\n.", b"cnumpy\nload\n.", b"cnumpy.core.multiarray\nscalar\n.", b"cbuiltins\ngetattr\n."]
)
def test_a_pickle_may_ask_for_arrays_only(tmp_path, line):
    folder = write(tmp_path, cifar10_files("python") | {"test_batch": line})
    module, name = line[1:-2].decode().split("\n")
    refused("cifar", folder, f"test_batch asks for {module}.{name}, which no arrays need")


def repickled(**content):
    return pickle.dumps({name.encode(): value for name, value in content.items()})


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "data_batch_2 is no pickle, or damaged: EOFError"),
        (b"not a pickle", "data_batch_2 is no pickle, or damaged"),
        (cifar10_files("python")["data_batch_2"][:-100], "data_batch_2 is no pickle, or damaged"),
        (pickle.dumps([1, 2]), "data_batch_2 must hold a dict. Received: list."),
        (repickled(labels=[0]), "data_batch_2 has no 'data'."),
        (pickled(IMAGES, fine_labels=NUMBERS), "data_batch_2 has no 'labels'."),
        (
            repickled(data=planes(IMAGES)[:, :9], labels=NUMBERS),
            "must be bytes [samples, 3072]. Received: uint8 [50, 9].",
        ),
        (repickled(data=planes(IMAGES).astype(np.int32), labels=NUMBERS), "Received: int32 [50, 3072]."),
        (
            repickled(data=planes(IMAGES) / 2, labels=NUMBERS),
            "is no pickle, or damaged: ValueError: an array of type f8",
        ),
        (repickled(data=[1, 2], labels=NUMBERS), "must be bytes [samples, 3072]. Received: list."),
        (
            repickled(data=planes(IMAGES), labels=[0] * 49),
            "one whole number for each of 50 images. Received: int64 [49].",
        ),
        (repickled(data=planes(IMAGES), labels=[0.5] * 50), "Received: float64 [50]."),
        (repickled(data=planes(IMAGES), labels=[[0], [1, 2]] * 25), "Received: float64 [0]."),
        (pickled(IMAGES, labels=NUMBERS + 4), "data_batch_2, record 6: the label 10 is not one of 10 classes"),
        (pickled(IMAGES, labels=NUMBERS - 1), "data_batch_2, record 0: the label -1 is not one of 10 classes"),
        (repickled(data=planes(IMAGES), labels=NUMBERS + 2**32), "record 0: the label 4294967296 is not one of 10"),
        (pickled(IMAGES[:0], labels=[]), "data_batch_2 holds no images."),
    ],
)
def test_damaged_python_batches_are_named(tmp_path, content, cause):
    refused("cifar", write(tmp_path, cifar10_files("python") | {"data_batch_2": content}), cause)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "data_batch_2.bin holds 0 bytes: that is no whole number of records of 3073."),
        (binary(IMAGES, NUMBERS)[:-1], "data_batch_2.bin holds 153649 bytes"),
        (binary(IMAGES, NUMBERS + 200), "data_batch_2.bin, record 0: the label 200 is not one of 10 classes"),
    ],
)
def test_damaged_binary_batches_are_named(tmp_path, content, cause):
    refused("cifar", write(tmp_path, cifar10_files("binary") | {"data_batch_2.bin": content}), cause)


def test_cifar_files_that_are_missing_or_of_two_kinds_are_named(tmp_path):
    refused("cifar", tmp_path, "holds none of CIFAR's files")
    folder = write(tmp_path / "a", cifar10_files("binary"))
    (folder / "data_batch_4.bin").unlink()
    refused("cifar", folder, "holds no data_batch_4.bin, and needs data_batch_1.bin, data_batch_2.bin")
    (folder / "data_batch_4.bin").mkdir()
    refused("cifar", folder, "holds no data_batch_4.bin")
    both = write(tmp_path / "b", cifar10_files("binary") | cifar10_files("python"))
    refused("cifar", both, "holds both data_batch_1.bin and data_batch_1: name the folder of one of them.")


def test_damaged_tar_files_are_refused(tmp_path):
    whole = packed(tmp_path / "a.tar.gz", cifar10_files("python"))
    (tmp_path / "b.tar.gz").write_bytes(whole.read_bytes()[:-1000])
    refused("cifar", tmp_path / "b.tar.gz", "b.tar.gz is no tar file, or damaged")
    (tmp_path / "c.tar.gz").write_text("nothing")
    refused("cifar", tmp_path / "c.tar.gz", "c.tar.gz is no tar file, or damaged")
    refused("cifar", packed(tmp_path / "d.tar.gz", {}), "holds none of CIFAR's files")
    plain = gzip.decompress(whole.read_bytes())
    (tmp_path / "e.tar").write_bytes(plain[: plain.index(b"cifar-10-batches-py/test_batch")])
    refused("cifar", tmp_path / "e.tar", "e.tar is no tar file, or damaged: its end is missing")


@pytest.mark.data
def test_real_cifar_images_come_out_as_they_went_in(tmp_path):
    folder = os.environ.get(DATA_VARIABLE, "")
    archive = Path(folder) / "cifar10-train.tar.gz"
    if not archive.is_file():
        pytest.skip(f"{DATA_VARIABLE} holds no cifar10-train.tar.gz")
    images = []
    with tarfile.open(archive) as members:
        for member in members:
            if member.name.endswith(".jpg"):
                images.append(tf.io.decode_jpeg(members.extractfile(member).read()).numpy())
            if len(images) == 50:
                break
    files = {f"data_batch_{i}": pickled(np.stack(images)[s], labels=NUMBERS[s]) for i, s in enumerate(FIVE, 1)}
    splits = load("cifar", packed(tmp_path / "real.tar.gz", files), validation=5)
    seen = {image.tobytes() for part in (splits.train, splits.validation) for image in arrays(part)[0]}
    assert seen == {image.tobytes() for image in images}


# -- CSV --


TABLE = """\
id,size,colour,weight,price
1,2.5,red,1,3
2,0.5,blue,2,1
3,1.5,red,4,0
4,3.5,green,8,2
"""


def table(tmp_path, text=TABLE, name="a.csv"):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


def rows_of(*count, seed=0):
    """A table of random rows and a header."""
    rng = np.random.default_rng(seed)
    lines = [f"{a:.3f},{'abc'[b]},{b}" for a, b in zip(rng.random(*count), rng.integers(0, 3, *count), strict=True)]
    return "\n".join(["size,colour,label", *lines]) + "\n"


def test_numbers_and_categories_are_kept_apart(tmp_path):
    held = table(tmp_path, "colour,price,size,weight,more\nred,1,9,9,x\nviolet,0,8,8,y\n", "b.csv")
    splits = load("csv", table(tmp_path), target="price", columns="size,colour,weight", validation_path=str(held))
    inputs, labels = arrays(splits.train)
    assert inputs["numeric"].tolist() == [[2.5, 1], [0.5, 2], [1.5, 4], [3.5, 8]]
    assert inputs["numeric"].dtype == np.float32
    assert inputs["categorical"].tolist() == [[1], [2], [1], [3]]
    assert (inputs["categorical"].dtype, labels.dtype) == (np.int32, np.int32)
    assert labels.tolist() == [3, 1, 0, 2]
    inputs, labels = arrays(splits.validation)
    assert inputs["numeric"].tolist() == [[9, 9], [8, 8]]  # by name, not by place
    assert inputs["categorical"].tolist() == [[1], [0]]  # violet is unknown
    assert labels.tolist() == [1, 0]
    assert (splits.sample_shape, splits.classes) == ({"numeric": (2,), "categorical": (1,)}, 4)


def test_columns_of_one_kind_are_one_array(tmp_path):
    path = table(tmp_path)
    numbers = load("csv", path, target="price", columns="size,weight", validation=1)
    assert (numbers.sample_shape, arrays(numbers.train)[0].dtype) == ((2,), np.float32)
    texts = load("csv", path, target="price", columns="colour", validation=1)
    assert (texts.sample_shape, arrays(texts.train)[0].dtype) == ((1,), np.int32)
    named = load("csv", path, target="price", columns="size", inputs="dict", validation=1)
    assert named.sample_shape == {"numeric": (1,)}
    refused(
        "csv", path, "inputs array takes columns of one kind", ConfigError, target="price", inputs="array", validation=1
    )


def test_held_out_rows_say_nothing_of_the_vocabulary(tmp_path):
    lines = [f"{chr(97 + i)},{i % 2}" for i in range(20)]  # every text once
    splits = load("csv", table(tmp_path, "\n".join(["text,label", *lines])), target="label", validation=6)
    assert sorted(arrays(splits.train)[0][:, 0]) == list(range(1, 15))
    assert arrays(splits.validation)[0][:, 0].tolist() == [0] * 6
    assert np.bincount(arrays(splits.validation)[1]).tolist() == [3, 3]  # each label's share


def test_a_limited_vocabulary_keeps_what_is_frequent(tmp_path):
    train = "text,label\n" + "".join(f"{text},0\n" for text in "abbcccdddd")
    held = table(tmp_path, "text,label\na,0\nb,0\nc,0\nd,0\n", "b.csv")
    arguments = {"target": "label", "validation_path": str(held)}
    assert arrays(load("csv", table(tmp_path, train), **arguments).validation)[0].ravel().tolist() == [1, 2, 3, 4]
    kept = load("csv", table(tmp_path, train), vocabulary=3, **arguments)
    assert arrays(kept.validation)[0].ravel().tolist() == [0, 0, 1, 2]  # all are below 3


def test_numbers_can_be_categories(tmp_path):
    splits = load("csv", table(tmp_path), target="price", columns="size,weight", categorical="weight", validation=1)
    assert splits.sample_shape == {"numeric": (1,), "categorical": (1,)}


@pytest.mark.parametrize(
    ("targets", "arguments", "values", "classes"),
    [
        (["no", "yes", "no", "maybe"], {}, [1, 2, 1, 0], 3),
        ([0, 3, 1, 2], {}, [0, 3, 1, 2], 4),
        ([0, 3, 1, 2], {"classes": 7}, [0, 3, 1, 2], 7),
        ([0, 3, 1, 2], {"task": "regression"}, [[0.0], [3.0], [1.0], [2.0]], None),
        ([0.5, 3, -1, 2], {}, [[0.5], [3.0], [-1.0], [2.0]], None),
    ],
)
def test_targets_are_labels_or_numbers(tmp_path, targets, arguments, values, classes):
    text = "\n".join(["x,y", *(f"{i},{target}" for i, target in enumerate(targets))])
    path = table(tmp_path, text)
    splits = load("csv", path, target="y", validation_path=str(path), **arguments)
    assert arrays(splits.train)[1].tolist() == values
    assert splits.classes == classes


@pytest.mark.parametrize("value", ["", " ", "NA", "nan", "?", "null"])
def test_missing_values_are_named_or_filled(tmp_path, value):
    text = TABLE.replace("2,0.5,blue", f"2,{value},blue").replace("green", value)
    path = table(tmp_path, text)
    arguments = {"target": "price", "columns": "size,colour"}
    refused("csv", path, f"{path}, line 3: the column 'size' has no value. --data-args missing 0", **arguments)
    only = {"target": "price", "columns": "colour"}
    refused("csv", path, f"{path}, line 5: the column 'colour' has no value.", **only)
    inputs, _ = arrays(load("csv", path, missing=-2, validation_path=str(path), **arguments).train)
    assert inputs["numeric"].ravel().tolist() == [2.5, -2, 1.5, 3.5]
    assert inputs["categorical"].ravel().tolist() == [1, 2, 1, 0]
    refused(
        "csv",
        table(tmp_path, TABLE.replace("red,4,0", f"red,4,{value}")),
        "line 4: the column 'price' has no value.",
        missing=0,
        **arguments,
    )


def test_a_column_without_any_value_is_numeric(tmp_path):
    path = table(tmp_path, "a,b,y\n,1,0\n,2,1\n")
    splits = load("csv", path, target="y", missing=0.5, validation=1)
    assert arrays(splits.train)[0][0, 0] == 0.5


def test_a_text_after_numbers_is_named_with_its_line(tmp_path):
    path = table(tmp_path, TABLE.replace("1.5", "1,5").replace("3,1,5,red,4,0", '3,"1,5",red,4,0'))
    refused("csv", path, f"{path}, line 4: '1,5' in the column 'size' is no number", target="price")
    refused("csv", path, "give --data-args categorical size", target="price")
    assert load("csv", path, target="price", categorical="size", validation=1).train.size == 3


def test_values_may_hold_delimiters_and_lines(tmp_path):
    text = 'name;y\n"a;b";0\n"c\nd";1\n\n"e ""f""";x\n'
    path = table(tmp_path, "\ufeff" + text)
    refused("csv", path, f"{path}, line 6: 'x' in the column 'y' is no number", target="y", delimiter=";")
    splits = load("csv", table(tmp_path, text.replace("x", "1")), target="y", delimiter=";", validation=1)
    assert (splits.train.size, splits.validation.size) == (2, 1)
    tabs = table(tmp_path, TABLE.replace(",", "\t"))
    assert load("csv", tabs, target="price", delimiter="tab", validation=1).classes == 4


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "is empty: it needs a line with the names of its columns."),
        ("x,y\n", "has no rows below its header."),
        ("x,y,x\n1,2,3\n", "has two columns 'x'."),
        ("x,y\n1,2\n1\n", "line 3: the row has 1 values; the header names 2."),
        ("x,y\n1,2,3\n", "line 2: the row has 3 values; the header names 2."),
        ('x,y\n1,"2', "after line 1: it is no CSV file in UTF-8, or damaged"),
        ("x,y\n1,-1\n2,0\n", "line 2: the label -1 is not one of 1 classes, which count from 0."),
    ],
)
def test_tables_that_cannot_be_read_are_named(tmp_path, text, cause):
    path = table(tmp_path, text)
    refused("csv", path, cause, target="y")
    refused("csv", path, str(path), target="y")


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"x,y\n1,\xff\n")
    refused("csv", tmp_path / "a.csv", "is no CSV file in UTF-8, or damaged", target="y")
    (tmp_path / "b.csv").mkdir()
    refused("csv", tmp_path / "b.csv", "b.csv cannot be read: Is a directory.", target="y")


@pytest.mark.parametrize(
    ("arguments", "error", "cause"),
    [
        ({}, ConfigError, "csv needs --data-args target COLUMN."),
        ({}, ConfigError, "has: id, size, colour, weight, price."),
        ({"target": "prize"}, ConfigError, "has no column 'prize'. Perhaps you meant: price."),
        ({"target": "price", "columns": "size,hue"}, ConfigError, "has no column 'hue'."),
        ({"target": "price", "columns": "price"}, ConfigError, "The target 'price' of"),
        ({"target": "price", "columns": "size", "categorical": "colour"}, ConfigError, "'colour' of"),
        ({"target": "price", "task": "guess"}, ConfigError, "task must be one of auto, classification, regression."),
        ({"target": "price", "inputs": "list"}, ConfigError, "inputs must be one of auto, dict, array."),
        ({"target": "price", "delimiter": "::"}, ConfigError, "one character as delimiter, or tab. Received: '::'."),
        ({"target": "price", "validation": 1, "validation_path": "x"}, ConfigError, "give one of both"),
        ({"target": "colour", "task": "regression"}, ConfigError, "is no number: it cannot be regressed"),
        ({"target": "size", "classes": 3}, ConfigError, "is no label: leave out classes"),
        ({"target": "size", "task": "classification"}, DataError, "line 2: the label 2.5 is no whole number"),
        ({"target": "price", "classes": 3}, DataError, "line 2: the label 3 is not one of 3 classes"),
        ({"target": "price", "validation": 4}, DataError, "4 cannot be held out"),
    ],
)
def test_arguments_that_do_not_fit_the_table_are_refused(tmp_path, arguments, error, cause):
    refused("csv", table(tmp_path), cause, error, **arguments)


def test_a_file_for_validation_must_fit_the_first(tmp_path):
    first = table(tmp_path)
    for text, cause in {
        "size,price\n1,2\n": "has no column 'colour'. It has: size, price.",
        TABLE.replace("0.5", "half"): "line 3: 'half' in the column 'size' is no number",
    }.items():
        held = table(tmp_path, text, "b.csv")
        refused("csv", first, f"{held}", target="price", columns="size,colour", validation_path=str(held))
        refused("csv", first, cause, target="price", columns="size,colour", validation_path=str(held))
    held = table(tmp_path, TABLE.replace("green", "purple"), "b.csv")
    refused(
        "csv",
        first,
        f"{held}, line 5: the label 'purple' is not in {first}.",
        target="colour",
        validation_path=str(held),
    )


def test_a_long_table_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.data.sources.csv_file.ROWS_AT_A_TIME", 7)
    lines = [f"{'' if i < 10 else chr(97 + i % 3)},{i},{i % 2}" for i in range(40)]  # the first texts are missing
    path = table(tmp_path, "\n".join(["text,x,y", *lines]))
    inputs, _ = arrays(load("csv", path, target="y", missing=0, validation_path=str(path)).train)
    assert inputs["numeric"].ravel().tolist() == list(range(40))
    expected = [0 if i < 10 else 1 + (i - 10) % 3 for i in range(40)]
    assert inputs["categorical"].ravel().tolist() == expected
