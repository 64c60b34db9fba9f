"""What sources say of their preprocessing, and what a run's folder keeps of it."""

import json
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import CheckpointError, ConfigError, DataError
from hvdtrain.data.preprocessing import (
    ImageInputs,
    Preprocessing,
    TableColumn,
    TableInputs,
    TextInputs,
    label_mapping,
)
from hvdtrain.data.registry import load_like, load_splits
from hvdtrain.models.objective import output_kind
from hvdtrain.runs.description import RunDescription, describe_run, read_description, write_description
from hvdtrain.runs.folder import RunFolder
from tests.unit.images import write_folders

LEAF = {"dtype": "float32", "shape": [3]}


def described_data(name, **arguments):
    config = DataConfig(name, arguments)
    splits = load_splits(config)
    model = keras.Sequential([keras.layers.Dense(2)])
    return describe_run(config, splits, model, "mse"), splits


@pytest.mark.parametrize(
    "description",
    [
        RunDescription("digits", LEAF, 10, "logits"),
        RunDescription("x:y", {"a": LEAF, "b": {"dtype": "int32", "shape": []}}, None, "values"),
        RunDescription("x:y", [LEAF, LEAF], 3, "probabilities", Preprocessing(("ä", "b", "c"))),
        RunDescription(
            "csv",
            LEAF,
            None,
            "values",
            Preprocessing(table=TableInputs((TableColumn("a"), TableColumn("b", ("x", "1"))), True, None, "t", "\t")),
        ),
        RunDescription(
            "class_folders", LEAF, 2, "logits", Preprocessing(image=ImageInputs(4, 5, 3, 255.0, (0.1,), ()))
        ),
        RunDescription("text", LEAF, 5, "logits", Preprocessing(text=TextInputs("chars", 8, alphabet="\n äé"))),
    ],
)
def test_what_is_written_is_read(tmp_path, description):
    folder = RunFolder(tmp_path)
    write_description(folder, description)
    assert read_description(folder, "predict") == description
    assert json.loads(folder.preprocessing.read_text())["kind"] == description.preprocessing.kind


def test_shapes_are_tuples_in_the_nest_of_the_inputs():
    nest = {"a": LEAF, "b": [{"dtype": "int32", "shape": []}, LEAF]}
    assert RunDescription("x:y", nest, None, "values").sample_shape == {"a": (3,), "b": ((), (3,))}


def test_a_tokenizer_s_file_comes_along(tmp_path):
    cached = tmp_path / "cached.model"
    cached.write_bytes(b"pieces")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    text = TextInputs("sentencepiece", 8, model=str(cached))
    write_description(folder, RunDescription("text", LEAF, 5, "logits", Preprocessing(text=text)))
    cached.unlink()
    read = read_description(folder, "generate")
    assert read.preprocessing.text == replace(text, model=str(folder.tokenizer))
    assert folder.tokenizer.read_bytes() == b"pieces"
    assert '"model": "tokenizer.model"' in folder.preprocessing.read_text()  # the folder may be moved
    write_description(folder, read)  # a resumed run writes it again
    for elsewhere in ("/etc/passwd", "../other/tokenizer.model"):
        text = folder.preprocessing.read_text().replace('"tokenizer.model"', json.dumps(elsewhere))
        (tmp_path / "preprocessing.json").write_text(text)
        with pytest.raises(CheckpointError, match=f"in its own folder. Received: '{elsewhere}'"):
            read_description(RunFolder(tmp_path), "predict")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("{", "preprocessing.json is damaged"),
        ('{"format": 1}', "preprocessing.json is damaged"),
        ('{"format": 9}', "has format 9; this version of hvdtrain reads 1"),
    ],
)
def test_a_damaged_description_is_named(tmp_path, text, answer):
    (tmp_path / "preprocessing.json").write_text(text)
    with pytest.raises(CheckpointError, match=answer):
        read_description(RunFolder(tmp_path), "predict")


def test_a_folder_without_one_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"predict .*: there is no preprocessing.json in it.*whole folder"):
        read_description(RunFolder(tmp_path), "predict")


def test_images_are_described_and_normalized(tmp_path):
    write_folders(tmp_path, classes=("bee", "ant"), each=10)
    arguments = {"path": str(tmp_path), "image_size": 4, "mean": "0.5,0.4,0.3", "std": 0.25}
    found, splits = described_data("class_folders", **arguments)
    assert found.inputs == {"dtype": "float32", "shape": [4, 4, 3]}
    assert found.classes == 2
    assert found.preprocessing == Preprocessing(
        ("ant", "bee"), image=ImageInputs(4, 4, 3, mean=(0.5, 0.4, 0.3), std=(0.25,))
    )
    assert splits.held_out
    raw = splits.train.gather(tf.constant([0, 1]))
    inputs, labels = splits.finish(*raw)
    np.testing.assert_allclose(inputs, (raw[0].numpy() / 255 - [0.5, 0.4, 0.3]) / 0.25, atol=1e-6)
    np.testing.assert_array_equal(labels, raw[1])


@pytest.mark.parametrize(
    ("arguments", "error", "answer"),
    [
        ({"mean": "0.5,0.4"}, DataError, "mean takes one number, or 3 separated by commas"),
        ({"std": "a"}, DataError, "std takes one number"),
        ({"std": "1,0,1"}, ConfigError, "must not be 0"),
    ],
)
def test_a_wrong_mean_or_std_is_refused(tmp_path, arguments, error, answer):
    write_folders(tmp_path, each=10)
    with pytest.raises(error, match=answer):
        load_splits(DataConfig("class_folders", {"path": str(tmp_path), **arguments}))


@pytest.mark.parametrize(
    ("dtype", "image"), [("uint8", ImageInputs(6, 5, 1)), ("float32", None)], ids=["pixels", "floats"]
)
def test_arrays_are_pixels_if_they_are_bytes(tmp_path, dtype, image):
    x = np.ones((20, 6, 5), dtype)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(20) % 2, x_test=x, y_test=np.arange(20) % 2)
    found, splits = described_data("arrays", path=str(tmp_path / "a.npz"))
    assert found.preprocessing.image == image
    assert found.inputs == {"dtype": "float32", "shape": [6, 5, 1] if image else [6, 5]}
    assert not splits.held_out


def test_digits_are_scaled_by_16():
    found, splits = described_data("digits")
    assert found.preprocessing.image == ImageInputs(8, 8, 1, white=16.0)
    assert found.preprocessing.class_names == tuple("0123456789")
    assert splits.held_out


TABLE = "city,size,kind\nrome,1,x\noslo,2,y\nrome,3,x\nbonn,4,x\n" + "rome,5,y\noslo,6,x\n" * 8


def test_tables_are_described_and_other_rows_encoded_likewise(tmp_path):
    (tmp_path / "t.csv").write_text(TABLE)
    arguments = {"path": str(tmp_path / "t.csv"), "target": "kind", "validation": 2}
    found, _ = described_data("csv", **arguments)
    table = found.preprocessing.table
    assert found.preprocessing.class_names == ("x", "y")
    assert [column.name for column in table.columns] == ["city", "size"]
    assert found.inputs == {
        "numeric": {"dtype": "float32", "shape": [1]},
        "categorical": {"dtype": "int32", "shape": [1]},
    }
    vocabulary = table.columns[0].vocabulary
    # In another order, with a city that is new, and with labels of which the first is the second.
    (tmp_path / "o.csv").write_text("size,kind,city\n9,y,paris\n8,y,oslo\n7,x,rome\n")
    config = DataConfig("csv", {"path": str(tmp_path / "o.csv"), "validation": 1})
    other = load_like(config, found.preprocessing, 2)
    parts = [part.gather(tf.range(part.size)) for part in (other.train, other.validation)]
    rows = sorted(
        (float(size), int(city), int(label))
        for inputs, labels in parts
        for size, city, label in zip(inputs["numeric"][:, 0], inputs["categorical"][:, 0], labels, strict=True)
    )
    ids = {name: number for number, name in enumerate(vocabulary, 1)}
    assert rows == [(7.0, ids["rome"], 0), (8.0, ids["oslo"], 1), (9.0, 0, 1)]


@pytest.mark.parametrize(
    ("rows", "arguments", "error", "answer"),
    [
        ("city,size,kind\nrome,1,z\n", {}, DataError, "o.csv, row 0: the label 'z' is not among those trained on"),
        ("city,kind\nrome,x\n", {}, DataError, "has no column 'size'"),
        ("city,size,kind\nrome,?,x\n", {}, DataError, "row 0: the column 'size' has no value"),
        ("city,size,kind\nrome,1,x\n", {"target": "city"}, ConfigError, "The run's target is 'kind'"),
    ],
)
def test_other_rows_that_do_not_fit_are_refused(tmp_path, rows, arguments, error, answer):
    (tmp_path / "t.csv").write_text(TABLE)
    found, _ = described_data("csv", path=str(tmp_path / "t.csv"), target="kind")
    (tmp_path / "o.csv").write_text(rows)
    with pytest.raises(error, match=answer):
        load_like(DataConfig("csv", {"path": str(tmp_path / "o.csv"), **arguments}), found.preprocessing, 2)


@pytest.mark.parametrize("source", ["text", "masked_text"])
def test_other_text_is_encoded_with_the_run_s_alphabet(tmp_path, source):
    (tmp_path / "a.txt").write_text("abcdefgh" * 50)
    (tmp_path / "b.txt").write_text("hgfb" * 50)
    arguments = {"path": str(tmp_path / "a.txt"), "length": 8}
    found, splits = described_data(source, **arguments)
    text = found.preprocessing.text
    assert (text.alphabet, text.length, text.masked) == ("abcdefgh", 8, source == "masked_text")
    other = load_like(
        DataConfig(source, {**arguments, "path": str(tmp_path / "b.txt")}), found.preprocessing, found.classes
    )
    assert other.classes == splits.classes
    assert list(other.train.tokens.numpy()[:4]) == [7, 6, 5, 1]
    (tmp_path / "b.txt").write_text("hgfz" * 50)
    with pytest.raises(DataError, match="'z' is not in the alphabet"):
        load_like(DataConfig(source, {"path": str(tmp_path / "b.txt")}), found.preprocessing, found.classes)
    with pytest.raises(ConfigError, match="windows of 8 tokens"):
        load_like(DataConfig(source, {"length": 9}), found.preprocessing, found.classes)


@pytest.mark.parametrize(
    ("theirs", "mine", "mapping"),
    [
        (("a", "b"), ("a", "b"), None),
        (("a", "c"), ("b", "c", "a"), (2, 1)),
        (None, ("a",), None),
        (("a",), None, None),
    ],
)
def test_labels_are_matched_by_name(theirs, mine, mapping):
    assert label_mapping(theirs, mine, lambda: "data") == mapping


def test_an_unknown_class_is_named():
    with pytest.raises(DataError, match=r"data has the class 'z', which the run was not trained on. It knows: a, b."):
        label_mapping(("a", "z"), ("a", "b"), lambda: "data")


def custom_loss(y_true, y_pred):
    return keras.ops.mean(y_pred, axis=-1)


@pytest.mark.parametrize(
    ("units", "activation", "loss", "classes", "kind"),
    [
        (3, None, keras.losses.SparseCategoricalCrossentropy(from_logits=True), 3, "logits"),
        (3, "softmax", "sparse_categorical_crossentropy", 3, "probabilities"),
        (3, "softmax", keras.losses.CategoricalCrossentropy(name="mine"), 3, "probabilities"),
        (1, "sigmoid", "binary_crossentropy", 2, "binary_probabilities"),
        (1, None, keras.losses.BinaryCrossentropy(from_logits=True), 2, "binary_logits"),
        (1, None, "mse", None, "values"),
        (3, None, "mse", 3, "values"),
        (3, "softmax", custom_loss, 3, "probabilities"),
        (3, None, custom_loss, 3, "logits"),
        (4, None, custom_loss, 3, "values"),
        (3, None, {"a": "mse"}, 3, "values"),
    ],
)
def test_what_outputs_are_follows_from_the_loss(units, activation, loss, classes, kind):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units, activation=activation)])
    assert output_kind(model, loss, classes) == kind
