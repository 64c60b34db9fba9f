import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from hvdtrain.config.errors import ConfigError, DataError
from tests.unit.data.sources.loading import arrays, load, refused

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
    advice = "Training with --data-args missing 0 makes it 0."
    refused("csv", path, f"{path}, row 1: the column 'size' has no value. {advice}", **arguments)
    only = {"target": "price", "columns": "colour"}
    refused("csv", path, f"{path}, row 3: the column 'colour' has no value.", **only)
    inputs, _ = arrays(load("csv", path, missing=-2, validation_path=str(path), **arguments).train)
    assert inputs["numeric"].ravel().tolist() == [2.5, -2, 1.5, 3.5]
    assert inputs["categorical"].ravel().tolist() == [1, 2, 1, 0]
    refused(
        "csv",
        table(tmp_path, TABLE.replace("red,4,0", f"red,4,{value}")),
        "row 2: the column 'price' has no value.",
        missing=0,
        **arguments,
    )


def test_a_text_after_numbers_is_named_with_its_row(tmp_path):
    path = table(tmp_path, TABLE.replace("1.5", "1,5").replace("3,1,5,red,4,0", '3,"1,5",red,4,0'))
    refused("csv", path, f"{path}, row 2: '1,5' in the column 'size' is not a number", target="price")
    refused("csv", path, "give --data-args categorical size", target="price")
    assert load("csv", path, target="price", categorical="size", validation=1).train.size == 3


def test_values_may_hold_delimiters_and_lines(tmp_path):
    text = 'name;y\n"a;b";0\n"c\nd";1\n\n"e ""f""";x\n'
    path = table(tmp_path, "\ufeff" + text)
    refused("csv", path, f"{path}, row 2: 'x' in the column 'y' is not a number", target="y", delimiter=";")
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
        ("x,y\n1,2\n1\n", "row 1: it has 1 values; the header names 2."),
        ("x,y\n1,2,3\n", "row 0: it has 3 values; the header names 2."),
        ("x,y\n1,-1\n2,0\n", "row 0: the label -1 is not one of 1 classes, which count from 0."),
    ],
)
def test_tables_that_cannot_be_read_are_named(tmp_path, text, cause):
    path = table(tmp_path, text)
    refused("csv", path, cause, target="y")
    refused("csv", path, str(path), target="y")


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"x,y\n1,\xff\n")
    refused("csv", tmp_path / "a.csv", "row 0: CSV conversion error to string: invalid UTF8 data", target="y")
    (tmp_path / "c.csv").write_bytes(b"x,\xff\n1,2\n")
    refused("csv", tmp_path / "c.csv", "c.csv is damaged, or not what its name says: 'utf-8' codec", target="x")
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
        ({"target": "colour", "task": "regression"}, ConfigError, "is not a number: it cannot be regressed"),
        ({"target": "size", "classes": 3}, ConfigError, "is not a label: leave out classes"),
        ({"target": "size", "task": "classification"}, DataError, "row 0: label 2.5 is not an integer"),
        ({"target": "price", "classes": 3}, DataError, "row 0: the label 3 is not one of 3 classes"),
        ({"target": "price", "validation": 4}, DataError, "4 cannot be held out"),
    ],
)
def test_arguments_that_do_not_fit_the_table_are_refused(tmp_path, arguments, error, cause):
    refused("csv", table(tmp_path), cause, error, **arguments)


def test_a_file_for_validation_must_fit_the_first(tmp_path):
    first = table(tmp_path)
    for text, cause in {
        "size,price\n1,2\n": "has no column 'colour'. It has: size, price.",
        TABLE.replace("0.5", "half"): "row 1: 'half' in the column 'size' is not a number",
    }.items():
        held = table(tmp_path, text, "b.csv")
        refused("csv", first, f"{held}", target="price", columns="size,colour", validation_path=str(held))
        refused("csv", first, cause, target="price", columns="size,colour", validation_path=str(held))
    held = table(tmp_path, TABLE.replace("green", "purple"), "b.csv")
    refused(
        "csv",
        first,
        f"{held}, row 3: the label 'purple' is not among those trained on: ",
        target="colour",
        validation_path=str(held),
    )


def test_other_formats_hold_the_same_table(tmp_path):
    whole = csv.read_csv(table(tmp_path))
    pq.write_table(whole, tmp_path / "a.parquet", row_group_size=2)
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), whole.schema) as file:
        file.write_table(whole, max_chunksize=3)
    with pa.ipc.new_stream(str(tmp_path / "b.arrow"), whole.schema) as file:
        file.write_table(whole)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in whole.to_pylist()))
    expected = load("csv", tmp_path / "a.csv", target="price", categorical="weight", validation=1)
    for name in ("a.parquet", "a.arrow", "b.arrow", "a.jsonl"):
        splits = load("csv", tmp_path / name, target="price", categorical="weight", validation=1)
        assert splits.train.fingerprint() == expected.train.fingerprint()
        assert splits.validation.fingerprint() == expected.validation.fingerprint()
        assert splits.preprocessing == expected.preprocessing


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl"])
def test_damaged_files_of_other_formats_are_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"something else")
    refused("csv", tmp_path / name, f"{tmp_path / name} is damaged, or not what its name says", target="y")


def test_values_that_are_neither_numbers_nor_texts_are_refused(tmp_path):
    pq.write_table(pa.table({"a": [[1], [2]], "y": [0, 1]}), tmp_path / "a.parquet")
    refused("csv", tmp_path / "a.parquet", "holds list<element: int64>, not a value", target="y")


def test_without_pyarrow_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused("csv", table(tmp_path), "pip install 'hvdtrain[tables]'", ConfigError, target="price")
