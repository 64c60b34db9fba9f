import warnings

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from tests.unit.data.sources.loading import arrays, load, random, refused

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
        ({"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y}, "are ('float32 [3]', 'int32 []'); those of"),
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
    refused("arrays", tmp_path / "empty.npz", "empty.npz is damaged, or holds no NumPy arrays")
    (tmp_path / "text.npz").write_text("a,b\n1,2\n")
    refused("arrays", tmp_path / "text.npz", "text.npz is damaged, or holds no NumPy arrays")
    np.savez(tmp_path / "whole.npz", x=X, y=Y)
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    refused("arrays", tmp_path / "cut.npz", "cut.npz is damaged, or holds no NumPy arrays")
    place = whole.index(X.tobytes())
    (tmp_path / "changed.npz").write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
    refused("arrays", tmp_path / "changed.npz", "The array x of")
    np.save(tmp_path / "one.npy", X)
    refused("arrays", tmp_path / "one.npy", "one.npy: an array belongs in a folder")
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


@pytest.mark.parametrize("source", ["arrays", "class_folders"])
def test_a_path_that_is_not_there_is_named(tmp_path, source):
    refused(source, tmp_path / "nothing", f"There is no {tmp_path / 'nothing'}")
    refused(source, "", "--data-args path PATH")
