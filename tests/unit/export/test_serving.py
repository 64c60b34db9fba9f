"""What an exported model takes equals what a run's own preprocessing makes of the same data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.data.preprocessing import ImageInputs, Preprocessing, TableColumn, TableInputs, TextInputs
from hvdtrain.data.sources.images import scaled
from hvdtrain.data.sources.table import encoded, read_table
from hvdtrain.data.sources.table_file import rows_in_memory
from hvdtrain.export.serving import readable, serving_of
from hvdtrain.runs.description import RunDescription
from hvdtrain.runs.predict import readable_outputs

KINDS = ("logits", "probabilities", "binary_logits", "binary_probabilities", "values")


def identity(shape, dtype="float32"):
    inputs = keras.Input(shape, dtype=dtype)
    return keras.Model(inputs, keras.ops.cast(inputs, "float32") * 1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 2, 5])
def test_outputs_are_those_of_predict(kind, width):
    outputs = np.random.default_rng(0).random((7, width), np.float32)
    described = RunDescription("own", {"dtype": "float32", "shape": []}, width, kind)
    expected = readable_outputs(outputs, described)
    np.testing.assert_allclose(np.asarray(readable(tf.constant(outputs), kind)), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("image", "dtype"),
    [
        (ImageInputs(2, 3, 3), "uint8"),
        (ImageInputs(2, 3, 3, 16.0, mean=(0.5,), std=(0.25,)), "uint8"),
        (ImageInputs(2, 3, 3, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)), "uint8"),
        (ImageInputs(2, 3, 3, white=1.0), "float32"),
        (ImageInputs(2, 3, 3, white=65535.0), "float32"),
    ],
)
def test_pixels_are_scaled_as_in_training(image, dtype):
    draws = np.random.default_rng(0)
    pixels = (
        draws.integers(0, int(image.white) + 1, (5, *image.shape))
        if image.white > 1
        else draws.random((5, *image.shape))
    ).astype(dtype)
    prepared = np.asarray(scaled(pixels, image, white=image.white))
    serving = serving_of(
        identity(image.shape),
        {"dtype": "float32", "shape": list(image.shape)},
        "values",
        Preprocessing(image=image),
        strings=False,
    )
    assert serving.inputs.dtype == dtype
    np.testing.assert_allclose(serving.raw_of(prepared), pixels, rtol=1e-5)
    np.testing.assert_allclose(serving.call(pixels), prepared, rtol=1e-6)


@pytest.mark.parametrize("missing", [None, -1.0])
@pytest.mark.parametrize("kinds", ["both", "numbers", "texts"])
def test_columns_are_encoded_as_in_training(kinds, missing):
    rows = [
        {"age": 20.5, "town": "Ulm", "sex": "f"},
        {"age": 31.0, "town": " Bonn ", "sex": "m"},
        {"age": 18.0, "town": "elsewhere", "sex": "f"},
    ]
    columns = (TableColumn("age"), TableColumn("town", ("Bonn", "Ulm")), TableColumn("sex", ("m", "f")))
    chosen = tuple(
        column for column in columns if kinds == "both" or (column.vocabulary is None) == (kinds == "numbers")
    )
    table = TableInputs(chosen, kinds == "both", missing, "price")
    expected = encoded(
        read_table([rows_in_memory(rows)], {column.name: column.vocabulary is None for column in chosen}), table
    )
    if kinds == "both":
        parts = {
            name: keras.Input(array.shape[1:], dtype=str(array.dtype), name=name) for name, array in expected.items()
        }
        model = keras.Model(parts, {name: keras.ops.cast(part, "float32") for name, part in parts.items()})
        signature = {
            name: {"dtype": str(array.dtype), "shape": list(array.shape[1:])} for name, array in expected.items()
        }
    else:
        model = identity(expected.shape[1:], str(expected.dtype))
        signature = {"dtype": str(expected.dtype), "shape": list(expected.shape[1:])}
    serving = serving_of(model, signature, "values", Preprocessing(table=table), strings=True)
    assert any(spec.dtype == "string" for spec in keras.tree.flatten(serving.inputs)) == (kinds != "numbers")
    raw = {
        column.name: np.array([row[column.name] for row in rows], None if column.vocabulary else np.float32)
        for column in chosen
    }
    keras.tree.map_structure(np.testing.assert_array_equal, serving.call(raw), expected)
    back = serving.call(serving.raw_of(expected))
    keras.tree.map_structure(np.testing.assert_array_equal, back, expected)
    if kinds != "texts" and missing is not None:
        raw["age"][1] = np.nan
        numbers = serving.call(raw)
        assert (numbers["numeric"] if kinds == "both" else numbers)[1, 0] == missing


def test_formats_without_strings_take_encoded_rows_and_language_models_return_logits():
    table = TableInputs((TableColumn("town", ("Bonn",)),), False, None, "price")
    signature = {"dtype": "int32", "shape": [1]}
    serving = serving_of(identity((1,), "int32"), signature, "values", Preprocessing(table=table), strings=False)
    assert serving.inputs.dtype == "int32"
    text = Preprocessing(text=TextInputs("bytes", 4))
    serving = serving_of(identity((4,), "int32"), {"dtype": "int32", "shape": [4]}, "logits", text, strings=True)
    np.testing.assert_array_equal(serving.call(np.ones((2, 4), np.int32)), np.ones((2, 4)))
