"""What is predicted, read from what users name, and how predictions are written."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.prediction import pixels, samples_from, table_rows
from hvdtrain.data.preprocessing import ImageInputs, Preprocessing, TableColumn, TableInputs, TextInputs
from hvdtrain.data.sources.table_file import rows_in_memory
from hvdtrain.runs.description import RunDescription
from hvdtrain.runs.predict import RowFormat, RowWriter, readable_outputs
from tests.unit.images import encoded, picture, tar_of, write_folders

IMAGE = Preprocessing(image=ImageInputs(4, 4, 3))
TABLE = Preprocessing(
    table=TableInputs((TableColumn("size"), TableColumn("city", ("rome", "oslo"))), True, None, "price")
)
LEAF = {"dtype": "float32", "shape": [3]}


def read(paths, preprocessing, signature=LEAF, given=None):
    return samples_from(paths, given, preprocessing, signature)


def ids_of(samples):
    return [samples.identify(number) for number in range(samples.source.size)]


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder with six images, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    write_folders(tmp_path / "photos", each=3)
    return tmp_path


NAMES = [f"photos/{name}/{number:03}.png" for name in ("ant", "bee") for number in range(3)]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["photos"], NAMES),
        (["photos/bee/001.png", "photos/ant"], [NAMES[4], *NAMES[:3]]),
        (["photos/*/002.png"], [NAMES[2], NAMES[5]]),
        (["photos/**/000.png"], [NAMES[0], NAMES[3]]),
        (["-"], [NAMES[3], NAMES[0]]),
        (["photos.tar"], [f"photos.tar/{name}" for name in NAMES]),
        (["photos/bee/000.png", "photos/bee/000.png"], [NAMES[3]] * 2),
    ],
)
def test_images_come_from_files_folders_archives_and_patterns(photos, paths, names):
    tar_of(photos / "photos", photos / "photos.tar", "w")
    given = f"{NAMES[3]}\n{NAMES[0]}\n\n".encode() if paths == ["-"] else None
    samples = read(paths, IMAGE, given=given)
    assert samples.id_name == "path"
    assert ids_of(samples) == names
    assert samples.inputs().shape == (len(names), 4, 4, 3)


def test_an_image_of_the_right_size_keeps_its_pixels_and_others_their_middle(tmp_path):
    exact = picture(1, 4)
    (tmp_path / "exact.png").write_bytes(encoded(exact))
    wide = np.zeros((8, 16, 3), np.uint8)
    wide[:, 4:12] = 200  # the middle square
    (tmp_path / "wide.png").write_bytes(encoded(wide))
    inputs = read([str(tmp_path)], IMAGE).inputs()
    np.testing.assert_array_equal(inputs[0], exact.astype(np.float32) * np.float32(1 / 255))
    np.testing.assert_allclose(inputs[1], 200 / 255, atol=1e-6)


def test_images_that_are_no_square_are_cropped_to_the_proportions_of_the_inputs(tmp_path):
    tall = np.zeros((12, 12, 3), np.uint8)
    tall[:, 4:8] = 90  # the middle third
    (tmp_path / "a.png").write_bytes(encoded(tall))
    image = Preprocessing(image=ImageInputs(6, 2, 3))
    np.testing.assert_allclose(read([str(tmp_path)], image).inputs()[0], 90 / 255, atol=1e-6)


def test_grey_images_are_read_in_colour_and_the_other_way_round(tmp_path):
    Image.fromarray(np.full((4, 4), 51, np.uint8)).save(tmp_path / "a.png")
    assert (read([str(tmp_path)], IMAGE).inputs() == np.float32(51) * np.float32(1 / 255)).all()
    (tmp_path / "a.png").write_bytes(encoded(np.full((4, 4, 3), 51, np.uint8)))
    assert read([str(tmp_path)], Preprocessing(image=ImageInputs(4, 4, 1))).inputs().shape == (1, 4, 4, 1)


@pytest.mark.parametrize(
    ("array", "image"),
    [
        (np.full((5, 4, 4, 3), 51, np.uint8), ImageInputs(4, 4, 3)),
        (np.full((4, 4, 3), 51, np.int64), ImageInputs(4, 4, 3)),
        (np.full((5, 4, 4, 3), 51.0), ImageInputs(4, 4, 3)),
        (np.full((5, 4, 4), 3.2), ImageInputs(4, 4, 1, white=16)),
        (np.full((4, 4), 3.2, np.float32), ImageInputs(4, 4, 1, white=16)),
        (np.zeros((5, 4, 4, 3), np.float32) + 51, ImageInputs(4, 4, 3)),
    ],
)
def test_arrays_of_pixels_are_scaled(array, image):
    inputs = pixels(array, image, "x").inputs()
    assert inputs.dtype == np.float32
    assert inputs.shape == ((1 if array.ndim < 4 and len(array) == 4 else 5), *image.shape)
    np.testing.assert_allclose(inputs, 0.2, atol=1e-6)


@pytest.mark.parametrize(
    ("array", "answer"),
    [
        (np.zeros((5, 5, 4, 3)), r"\[4, 4, 3\] pixels.*Received: float64 \[5, 5, 4, 3\]"),
        (np.full((5, 4, 4, 3), 0.5), "look scaled already"),
        (np.full((5, 4, 4, 3), 256), "from 0 to 255.*Received: values from 256"),
        (np.full((5, 4, 4, 3), -0.5), "Received: values from -0.5"),
        (np.full((5, 4, 4, 3), np.nan), "Received: values from nan"),
        (np.full((5, 4, 4, 3), "a"), "must hold numbers"),
    ],
)
def test_arrays_that_are_no_pixels_are_refused(array, answer):
    with pytest.raises(DataError, match=answer):
        pixels(array, ImageInputs(4, 4, 3), "x.npz")


CSV = "price,city,size\n1,rome,10\n2,lima,20\n3,oslo,30\n"
JSON = '{"city": "rome", "size": 10}\n\n{"size": 20.0, "city": "lima", "more": [1]}\n{"city": "oslo", "size": 30}\n'


@pytest.mark.parametrize(("name", "text"), [("t.csv", CSV), ("t.jsonl", JSON), ("-", CSV), ("-", JSON)])
def test_rows_come_from_csv_and_json_lines(tmp_path, name, text):
    (tmp_path / "t").with_suffix(Path(name).suffix).write_text(text)
    given = text.encode() if name == "-" else None
    samples = read(["-" if given else str(tmp_path / name)], TABLE, given=given)
    inputs = samples.inputs()
    np.testing.assert_array_equal(inputs["numeric"], [[10], [20], [30]])
    np.testing.assert_array_equal(inputs["categorical"], [[1], [0], [2]])
    assert (samples.id_name, ids_of(samples)) == ("row", [0, 1, 2])


class Frame(dict):
    """What is used of a pandas DataFrame."""

    @property
    def columns(self):
        return list(self)


@pytest.mark.parametrize(
    "given",
    [
        [{"city": "rome", "size": 10}, {"size": np.float32(20), "city": "lima"}],
        {"city": ["rome", "lima"], "size": np.array([10, 20])},
        Frame(size=[10.0, 20.0], city=np.array(["rome", "lima"])),
    ],
)
def test_rows_in_python_are_like_those_of_a_file(given):
    inputs = table_rows(rows_in_memory(given), TABLE.table).inputs()
    np.testing.assert_array_equal(inputs["numeric"], [[10], [20]])
    np.testing.assert_array_equal(inputs["categorical"], [[1], [0]])


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"city": ["rome"], "size": [1, 2]}, "columns differ in length: 1, 2"),
        ([["rome", 1]], "a list of dicts.*Received: list"),
        ([], "a list of dicts"),
        (3, "Received: int"),
        ([{"city": "rome"}, {"city": 1}], "The column 'city' holds values of different kinds"),
    ],
)
def test_other_objects_are_no_rows(given, answer):
    with pytest.raises(DataError, match=answer):
        rows_in_memory(given)


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    "arrays", [{"x": np.ones((5, 3))}, {"inputs": np.ones((5, 3)), "y": np.ones(5)}, {"any": np.ones((5, 3), int)}]
)
def test_arrays_come_from_a_file_or_standard_input(tmp_path, arrays):
    (tmp_path / "a.npz").write_bytes(npz(**arrays))
    for samples in (
        read([str(tmp_path / "a.npz")], Preprocessing()),
        read(["-"], Preprocessing(), given=npz(**arrays)),
    ):
        assert samples.source.size == 5
        assert samples.inputs().dtype == np.float32


def test_several_inputs_are_matched_by_name(tmp_path):
    signature = {"a": LEAF, "b": {"dtype": "int32", "shape": []}}
    inputs = read(["-"], Preprocessing(), signature, npz(b=np.arange(5.0), a=np.ones((5, 3)))).inputs()
    assert inputs["b"].dtype == np.int32
    with pytest.raises(DataError, match=r"the arrays a, b\. It has no b"):
        read(["-"], Preprocessing(), signature, npz(a=np.ones((5, 3))))


@pytest.mark.parametrize(
    ("paths", "given", "preprocessing", "answer"),
    [
        (["t.csv"], None, IMAGE, "The run is of images.*Received: t.csv"),
        (["no*.png"], None, IMAGE, r"No file matches no\*.png"),
        (["none"], None, IMAGE, "There is no .*none"),
        (["empty"], None, IMAGE, "empty holds no images"),
        (["a.npz", "b.npz"], None, IMAGE, "Name an .npz or .npy file by itself"),
        (["a.png"], None, TABLE, "The run is of a table.*Received: a.png"),
        (["none.csv"], None, TABLE, "There is no .*none.csv"),
        (["a.png"], None, Preprocessing(), "takes arrays.*Received: a.png"),
        (["-"], b"a,b\n", Preprocessing(), "something else on standard input"),
        (["-"], b" \n", TABLE, "nothing on standard input. A launcher"),
        (["-"], b"\xff\xfe", TABLE, "standard input is damaged, or not what its name says: .utf-8. codec"),
        (["-"], b'{"city": 1}\n', TABLE, "standard input has no column 'size'"),
        (["-"], b'{"city": 1, "size": 1}\n[3]\n', TABLE, "changed from object to array in row 1"),
        (["-"], b'{"city": 1, "size": 1}\n{\n', TABLE, "standard input is damaged.*in row 1"),
        (
            ["-"],
            b"city,size\nrome,many\n",
            TABLE,
            "row 0: 'many' .* is not a number, as those are that the",
        ),
        (
            ["-"],
            npz(x=np.ones((5, 2))),
            Preprocessing(),
            r"must be an array \[samples, 3\]. Received: float64 \[5, 2\]",
        ),
        (["-"], npz(foo=np.ones((5, 2))), Preprocessing(), "array 'foo' of standard input, which has no x or inputs,"),
        (["-"], npz(a=np.ones(5), b=np.ones(5)), Preprocessing(), "must hold one array.*It holds: a, b"),
        (["a.txt"], None, Preprocessing(text=TextInputs("bytes", 4)), "generate"),
    ],
)
def test_other_input_is_refused(tmp_path, monkeypatch, paths, given, preprocessing, answer):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("a.npz", "b.npz", "a.png", "t.csv"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=answer):
        read(paths, preprocessing, given=given)


# -- outputs and rows --


def run_of(outputs, classes=3, names=("ant", "bee", "cat")):
    return RunDescription("x:y", LEAF, classes, outputs, Preprocessing(names))


LOGITS = np.log(np.array([[0.1, 0.7, 0.2], [0.5, 0.25, 0.25]], np.float32))


@pytest.mark.parametrize(
    ("kind", "outputs", "readable"),
    [
        ("logits", LOGITS, np.exp(LOGITS)),
        ("probabilities", np.exp(LOGITS), np.exp(LOGITS)),
        ("binary_probabilities", np.array([[0.25], [1.0]]), [[0.75, 0.25], [0, 1]]),
        ("binary_logits", np.log([[1 / 3], [9.0]]), [[0.75, 0.25], [0.1, 0.9]]),
        ("binary_logits", np.array([[1e4, -1e4, 0]]), [[1, 0, 0.5]]),
        ("values", np.array([[4.0]]), [[4.0]]),
    ],
)
def test_outputs_become_probabilities(kind, outputs, readable):
    np.testing.assert_allclose(readable_outputs(outputs, run_of(kind)), readable, rtol=1e-6, atol=1e-7)


def lines(kind, outputs, row_format, errors=("", ""), classes=3, names=("ant", "bee", "cat"), id_name="row"):
    what = run_of(kind, classes, names)
    writer = RowWriter(what, row_format, id_name, errors=any(errors))
    return writer.lines(range(len(errors)), readable_outputs(outputs, what), errors).splitlines()


@pytest.mark.parametrize(
    ("row_format", "expected"),
    [
        (RowFormat(), ["row,class,probability", "0,bee,0.7", "1,ant,0.5"]),
        (
            RowFormat(top=2),
            ["row,class,probability,class_2,probability_2", "0,bee,0.7,cat,0.2", "1,ant,0.5,bee,0.25"],
        ),
        (
            RowFormat(all_probabilities=True),
            [
                "row,class,probability,probability:ant,probability:bee,probability:cat",
                "0,bee,0.7,0.1,0.7,0.2",
                "1,ant,0.5,0.5,0.25,0.25",
            ],
        ),
    ],
)
def test_rows_of_csv(row_format, expected):
    assert lines("logits", LOGITS, row_format) == expected


def test_lines_of_json():
    first, second = map(json.loads, lines("logits", LOGITS, RowFormat("jsonl", 2, True), ("", "damaged")))
    assert first == {
        "row": 0,
        "class": "bee",
        "probability": 0.7,
        "top": [{"class": "bee", "probability": 0.7}, {"class": "cat", "probability": 0.2}],
        "probabilities": {"ant": 0.1, "bee": 0.7, "cat": 0.2},
    }
    assert second == {"row": 1, "error": "damaged"}


def test_a_sample_that_cannot_be_read_has_no_prediction():
    assert lines("logits", LOGITS, RowFormat(), ("", "a, b")) == [
        "row,class,probability,error",
        "0,bee,0.7,",
        '1,,,"a, b"',
    ]


def test_classes_without_names_are_numbers():
    assert lines("logits", LOGITS, RowFormat(), names=None)[1:] == ["0,1,0.7", "1,0,0.5"]


@pytest.mark.parametrize(
    ("outputs", "header", "row"),
    [
        (np.array([[1234567.0], [0.5]]), "row,value", "0,1.23457e+06"),
        (np.array([3.0, 0.5]), "row,value", "0,3"),
        (np.array([[1.0, 2.0], [3.0, 4.0]]), "row,value_0,value_1", "0,1,2"),
        (np.array([[np.nan], [1.0]]), "row,value", "0,"),
        ({"a": np.array([[1.0], [2.0]]), "b": np.array([[3.0, 4.0], [5.0, 6.0]])}, "row,a,b_0,b_1", "0,1,3,4"),
        ((np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]])), "row,value_0,value_1", "0,1,3"),
    ],
)
def test_values_are_written_as_they_are(outputs, header, row):
    assert lines("values", outputs, RowFormat(), classes=None, names=None)[:2] == [header, row]


def test_labels_that_go_together_have_a_probability_each():
    found = lines("binary_probabilities", np.array([[0.9, 0.8, 0.1], [0, 0, 1.0]]), RowFormat())
    assert found[:2] == ["row,probability:ant,probability:bee,probability:cat", "0,0.9,0.8,0.1"]


@pytest.mark.parametrize(
    ("outputs", "row_format", "answer"),
    [
        (np.ones((2, 1)), RowFormat(top=2), "--top is for classes"),
        (np.ones((2, 1)), RowFormat(all_probabilities=True), "--probabilities is for classes"),
        (np.ones((2, 3, 4)), RowFormat(), r"an array \[3, 4\] for each sample.*--format jsonl"),
    ],
)
def test_what_does_not_fit_into_a_row_is_refused(outputs, row_format, answer):
    with pytest.raises(ConfigError, match=answer):
        lines("values", outputs, row_format, classes=None, names=None)


def test_arrays_go_into_lines_of_json():
    found = json.loads(lines("values", np.ones((2, 1, 2)), RowFormat("jsonl"), classes=None, names=None)[0])
    assert found == {"row": 0, "value": [[1.0, 1.0]]}
