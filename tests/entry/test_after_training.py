"""What users do with a finished run: evaluate it on other data, predict, generate text, from any folder."""

import csv
import io
import json
import shutil
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.launching import Job, errors_of, use_all

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("after")]  # one process makes the runs that these tests use
CLASSES = ("blue", "green", "red")
LINE = "one two three four five six seven eight nine ten\n"
TEXT = LINE * 60


def photo(number, label, size=(14, 11)):
    """Return noise with one strong colour channel."""
    pixels = np.random.default_rng(number).integers(0, 90, (*size, 3))
    pixels[..., 2 - label] += 150
    return pixels.astype(np.uint8)


def write_photos(root, classes, each, first=0):
    for place, name in enumerate(classes):
        folder = root / name
        folder.mkdir(parents=True)
        for number in range(each):
            pixels = photo(first + number + 1000 * place, CLASSES.index(name))
            Image.fromarray(pixels).save(folder / f"{number:02}.png")


def write_records(folder, classes, each):
    """Write a TFRecord file of JPEG images, and its description with the names of the classes."""
    import tensorflow as tf

    folder.mkdir()
    names = ", ".join(classes)
    (folder / "features.yaml").write_text(
        "features: {image: {kind: image}, label: {kind: int64, dtype: int32}}\n"
        f"inputs: image\ntargets: label\nclasses: {len(classes)}\nclass_names: [{names}]\n"
    )
    with tf.io.TFRecordWriter(str(folder / "images.tfrecord")) as writer:
        for number in range(each * len(classes)):
            label = number % len(classes)
            pixels = photo(2000 + number, CLASSES.index(classes[label]))
            image = tf.train.BytesList(value=[tf.io.encode_png(pixels).numpy()])
            features = {
                "image": tf.train.Feature(bytes_list=image),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())


def write_prices(file, rows, *, target=True, seed=0, cities=("rome", "oslo")):
    rng = np.random.default_rng(seed)
    lines = ["city,size,rooms" + ",price" * target]
    for number in range(rows):
        city, size, rooms = cities[number % len(cities)], rng.uniform(20, 100), rng.integers(1, 6)
        price = (2 if city == "rome" else 1) * size + 10 * rooms
        lines.append(f"{city},{size:.2f},{'' if number % 7 == 3 else rooms}" + f",{price:.2f}" * target)
    file.write_text("\n".join(lines) + "\n")


MODELS = """\
    import keras
    import numpy as np

    def prices(sample_shape):
        inputs = {name: keras.Input(shape, name=name) for name, shape in sample_shape.items()}
        cities = keras.layers.Flatten()(keras.layers.Embedding(8, 4)(inputs["categorical"]))
        x = keras.layers.Concatenate()([inputs["numeric"] / 50.0, cities])
        x = keras.layers.Dense(16, activation="relu")(x)
        return keras.Model(inputs, keras.layers.Dense(1)(x))

    prices.loss = "mse"

    def spam(sample_shape):
        return keras.Sequential([keras.Input(sample_shape), keras.layers.Dense(1, activation="sigmoid")])

    spam.loss = "binary_crossentropy"
    spam.metrics = ["binary_accuracy"]

    class Unknown(keras.Model):
        # Keras was not told of this class.
        def __init__(self):
            super().__init__()
            self.scores = keras.layers.Dense(1, activation="sigmoid")

        def call(self, inputs, training=False):
            return self.scores(inputs)

    def unknown():
        return Unknown()

    unknown.loss = "binary_crossentropy"

    def letters(path="", samples=96):
        x = np.random.random((samples, 4)).astype("float32")
        y = (x.sum(axis=1) > float(open(path).read())).astype("int32")
        return (x, y), (x[:32], y[:32])

    letters.classes = ["ham", "spam"]
"""


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """The folder with data, code and four runs, which were started there."""
    folder = tmp_path_factory.mktemp("home")
    write_photos(folder / "photos", CLASSES, 24)
    write_prices(folder / "prices.csv", 120)
    (folder / "own.py").write_text(textwrap.dedent(MODELS))
    (folder / "bound.txt").write_text("2.0")
    (folder / "text.txt").write_text(TEXT)
    images = ["--data", "class_folders", "--data-args", "path", "photos", "image_size", "8", "mean", "0.45", "std",
              "0.2,0.25,0.3", "--model", "small_cnn", "--model-args", "width", "4", "hidden", "16"]  # fmt: skip
    table = ["--data", "csv", "--data-args", "path", "prices.csv", "target", "price", "missing", "0"]
    table += ["--model", "own:prices"]
    arrays = ["--data", "own:letters", "--data-args", "path", "bound.txt", "--model", "own:spam"]
    text = ["gpt_char", "--data-args", "path", "text.txt", "length", "16", "--model-args", "depth", "1", "width", "32"]
    text += ["heads", "2", "--warmup-steps", "0"]
    quick = ["--batch", "24", "--learning-rate", "0.01", "--run-dir"]
    commands = [
        [*images, "--epochs", "6", *quick, "colours"],
        [*table, "--epochs", "2", *quick, "prices", "--ema", "0.9"],
        [*arrays, "--epochs", "2", *quick, "letters"],
        [*arrays[:-1], "own:unknown", "--epochs", "1", *quick, "unknown"],
        [*text, "--epochs", "24", *quick, "words"],
    ]
    use_all("none", 1, [["train", *command] for command in commands], cwd=folder)
    return folder


@pytest.fixture(scope="session")
def elsewhere(home, tmp_path_factory):
    """Another folder, with other data, from which the verbs were run on one rank and on two."""
    folder = tmp_path_factory.mktemp("elsewhere")
    write_photos(folder / "fewer", ("red", "green"), 5, first=500)
    write_photos(folder / "new" / "below", ("green",), 3, first=700)
    for number in (2, 9):
        Image.fromarray(photo(number, 0, (30, 20))).save(folder / "new" / f"{number}.jpg", quality=95)
    (folder / "new" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno image")
    write_prices(folder / "rows.csv", 37, target=False, seed=5, cities=("oslo", "rome", "lima"))
    write_prices(folder / "others.csv", 50, seed=6, cities=("oslo", "rome"))
    np.savez(folder / "x.npz", x=np.random.default_rng(0).random((50, 4)))
    write_records(folder / "packed", ("red", "blue"), 4)

    def of(name):
        return str(home / name)

    predictions = [
        ["predict", of("colours"), "new", "--on-bad-record", "skip:1", "--top", "3", "--out", "photos.csv"],
        ["predict", of("prices"), "rows.csv", "--format", "jsonl", "--out", "rows.jsonl"],
        ["predict", of("letters"), "x.npz", "--probabilities", "--out", "letters.csv", "--batch-size", "16"],
        ["predict", of("unknown"), "x.npz", "--out", "unknown.csv"],
    ]
    evaluations = [
        ["evaluate", of("colours")],
        ["evaluate", of("colours"), "--data-args", "path", "fewer"],
        ["evaluate", of("prices"), "--checkpoint", "best"],
        ["evaluate", of("prices"), "--data-args", "path", "others.csv"],
        ["evaluate", of("letters"), "--split", "train"],
        ["evaluate", of("colours"), "--data", "tfrecord", "--data-args", "path", "packed", "image_size", "8"],
    ]
    shutil.copytree(home / "letters", home / "resumed")
    trained = [
        ["train", "--resume", of("resumed"), "--epochs", "3"],
        ["train", "--config", of("letters/config.yaml"), "--max-steps", "2", "--run-dir", "again"],
        ["evaluate", "again"],
    ]
    commands = [*predictions, *evaluations, *trained, *generated(home)]
    (folder / "printed").write_text(use_all("none", 1, commands, cwd=folder))
    return folder


def generated(home):
    """Command lines that generate text, the last ones of a job."""
    run = str(home / "words")
    drawn = ["--length", "30", "--temperature", "1.5", "--top-k", "5", "--samples", "3", "--seed", "7"]
    return [
        ["generate", run, "--prompt", "one two", "--length", "40", "--temperature", "0"],
        ["generate", run, "--prompt", "five six", *drawn],
    ]


def figures_of(home, run, name="summary"):
    return json.loads((home / run / f"{name}.json").read_text())


def rows_of(file):
    return list(csv.DictReader(io.StringIO(file.read_text())))


def test_a_run_keeps_what_its_model_needs(home):
    kept = figures_of(home, "colours", "preprocessing")
    assert kept["kind"] == "image"
    assert kept["inputs"] == {"dtype": "float32", "shape": [8, 8, 3]}
    assert kept["preprocessing"]["class_names"] == list(CLASSES)
    image = kept["preprocessing"]["image"]
    assert (image["height"], image["mean"], image["std"]) == (8, [0.45], [0.2, 0.25, 0.3])
    table = figures_of(home, "prices", "preprocessing")["preprocessing"]["table"]
    assert [column["name"] for column in table["columns"]] == ["city", "size", "rooms"]
    assert table["columns"][0]["vocabulary"] == ["rome", "oslo"]
    assert figures_of(home, "letters", "preprocessing")["outputs"] == "binary_probabilities"
    assert figures_of(home, "letters", "preprocessing")["preprocessing"]["class_names"] == ["ham", "spam"]
    assert figures_of(home, "words", "preprocessing")["preprocessing"]["text"]["tokenizer"] == "chars"
    assert json.loads((home / "words" / "env.json").read_text())["folder"] == str(home)


def test_evaluation_from_another_folder_says_what_training_said(home, elsewhere):
    for of, name in (("colours", "evaluation"), ("prices", "evaluation-best")):
        summary, evaluated = figures_of(home, of), figures_of(home, of, name)
        assert evaluated["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-6)
        assert evaluated["split"] == "validation"
    assert figures_of(home, "letters", "evaluation-train")["samples"] == 96


def test_other_data_are_prepared_as_the_run_s_were(home, elsewhere):
    # Two of three classes, so their numbers are others: by name, and all of them.
    others = figures_of(home, "colours", "evaluation-fewer")
    assert (others["samples"], others["split"]) == (10, "all")
    assert others["val_accuracy"] == 1.0 == figures_of(home, "colours")["val_accuracy"]
    records = figures_of(home, "colours", "evaluation-packed")
    assert (records["samples"], records["val_accuracy"]) == (8, 1.0)
    prices = figures_of(home, "prices", "evaluation-others")
    assert prices["samples"] == 50
    assert figures_of(home, "prices", "evaluation-best")["samples"] == 12


def test_images_are_predicted_by_class_name_and_a_damaged_one_says_so(home, elsewhere):
    rows = rows_of(elsewhere / "photos.csv")
    names = [str(Path("new") / name) for name in ("2.jpg", "9.jpg", "below/green/00.png", "below/green/01.png",
                                                  "below/green/02.png", "broken.png")]  # fmt: skip
    assert [row["path"] for row in rows] == names
    assert [row["class"] for row in rows] == ["blue", "blue", "green", "green", "green", ""]
    assert all(float(row["probability"]) > 0.5 for row in rows[:5])
    assert [row["error"] != "" for row in rows] == [False] * 5 + [True]
    assert "new/broken.png" in rows[5]["error"]
    shares = [[float(row[f"probability{end}"]) for end in ("", "_2", "_3")] for row in rows[:5]]
    np.testing.assert_allclose(np.sum(shares, axis=1), 1, atol=1e-5)


def test_rows_of_a_table_are_predicted_with_the_vocabulary_of_training(home, elsewhere):
    import hvdtrain

    rows = [json.loads(line) for line in (elsewhere / "rows.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(37))
    loaded = hvdtrain.load_run(home / "prices")
    given = list(csv.DictReader((elsewhere / "rows.csv").open()))
    # rome is 1 and oslo 2, in the order of training; lima is unknown. A missing number is 0.
    ids = [{"rome": 1, "oslo": 2}.get(row["city"], 0) for row in given]
    numbers = [[float(row["size"]), float(row["rooms"] or 0)] for row in given]
    inputs = {"numeric": np.array(numbers, np.float32), "categorical": np.array(ids, np.int32)[:, np.newaxis]}
    prepared = loaded.preprocess(elsewhere / "rows.csv")
    np.testing.assert_array_equal(prepared["categorical"], inputs["categorical"])
    np.testing.assert_array_equal(prepared["numeric"], inputs["numeric"])
    # model.keras has the averages of --ema, as predict has.
    expected = loaded.model(inputs).numpy()[:, 0]
    np.testing.assert_allclose([row["value"] for row in rows], expected, rtol=1e-5)


def test_a_loaded_run_predicts_pixels_from_0_to_255_as_well_as_its_validation_did(home):
    import hvdtrain

    loaded = hvdtrain.load_run(home / "colours")
    assert loaded.classes == list(CLASSES)
    arrays = np.stack([photo(900 + number, number % 3, (8, 8)) for number in range(30)])
    labels = np.arange(30) % 3
    assert (loaded.predict(arrays).argmax(axis=1) == labels).mean() == 1.0
    np.testing.assert_allclose(loaded.predict(arrays.astype(np.float32)), loaded.predict(arrays), atol=1e-6)
    by_hand = (arrays / 255 - 0.45) / np.array([0.2, 0.25, 0.3])
    np.testing.assert_allclose(loaded.preprocess(arrays), by_hand, atol=1e-5)


def test_a_model_of_a_class_that_keras_does_not_know_is_loaded(home, elsewhere):
    import hvdtrain

    loaded = hvdtrain.load_run(home / "unknown")
    shares = loaded.predict(np.load(elsewhere / "x.npz")["x"])
    rows = rows_of(elsewhere / "unknown.csv")
    assert [row["class"] for row in rows] == [loaded.classes[label] for label in shares.argmax(axis=1)]
    np.testing.assert_allclose([float(row["probability"]) for row in rows], shares.max(axis=1), rtol=1e-4)


def test_ranks_predict_what_one_rank_predicts(home, elsewhere):
    def of(name):
        return str(home / name)

    printed = use_all(
        "mpirun",
        2,
        [
            ["predict", of("colours"), "new", "--on-bad-record", "skip:1", "--top", "3", "--out", "photos-2.csv"],
            ["predict", of("prices"), "rows.csv", "--format", "jsonl", "--out", "rows-2.jsonl"],
            ["predict", of("letters"), "x.npz", "--probabilities", "--out", "letters-2.csv", "--batch-size", "16"],
            ["evaluate", of("colours"), "--data-args", "path", "fewer", "--checkpoint", "best"],
            *generated(home),
        ],
        cwd=elsewhere,
    )
    alone = (elsewhere / "printed").read_text()
    assert printed[printed.index("one two") :] == alone[alone.index("one two") :]
    for one, two in (("photos.csv", "photos-2.csv"), ("rows.jsonl", "rows-2.jsonl"), ("letters.csv", "letters-2.csv")):
        assert (elsewhere / one).read_bytes() == (elsewhere / two).read_bytes()
    one, two = (figures_of(home, "colours", f"evaluation-{name}") for name in ("fewer", "best-fewer"))
    assert (one["world_size"], two["world_size"], two["step"]) == (1, 2, one["step"])
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-6)
    assert list(rows_of(elsewhere / "letters.csv")[0]) == [
        "row", "class", "probability", "probability:ham", "probability:spam",
    ]  # fmt: skip


def test_a_run_goes_on_and_is_repeated_from_another_folder(home, elsewhere):
    assert figures_of(home, "resumed")["epochs"] == 3
    assert figures_of(home, "resumed", "env")["folder"] == str(home)
    # Its own module and bound.txt are beside the first run, and the second is evaluated from there as well.
    assert figures_of(elsewhere, "again")["steps"] == 2
    assert figures_of(elsewhere, "again", "evaluation")["samples"] == 32


def test_a_language_model_continues_its_text(elsewhere):
    printed = (elsewhere / "printed").read_text()
    greedy = printed[printed.index("one two") : printed.index("--- sample 1 of 3")]
    assert greedy == LINE[: len("one two") + 40] + "\n"
    samples = printed[printed.index("--- sample 1 of 3") :].split("--- sample ")[1:]
    assert [sample.splitlines()[0] for sample in samples] == ["1 of 3", "2 of 3", "3 of 3"]
    assert len({sample.split("\n", 1)[1] for sample in samples}) == 3
    assert all(len(sample.split("\n", 1)[1]) == len("five six") + 30 + 1 for sample in samples)


def test_a_loaded_language_model_generates_the_same(home, elsewhere):
    import hvdtrain

    loaded = hvdtrain.load_run(home / "words")
    text = loaded.generate("one two", length=40, temperature=0)
    assert f"one two{text}\n" in (elsewhere / "printed").read_text()
    drawn = loaded.generate("five six", length=30, temperature=1.5, top_k=5, seed=7)
    assert f"--- sample 1 of 3\nfive six{drawn}\n" in (elsewhere / "printed").read_text()


def test_a_pipe_gets_predictions_alone(home, elsewhere):
    command = f"cat rows.csv | {sys.executable} -m hvdtrain predict {home / 'prices'} - --format jsonl"
    job = Job(["bash", "-c", command], cwd=elsewhere).expect()
    assert job.out == (elsewhere / "rows.jsonl").read_text()


MISTAKES = (
    (["predict", "colours", "rows.csv"], ["run is of images", "Received: rows.csv"]),
    (["predict", "colours", "nothing.jpg"], ["There is no", "nothing.jpg"]),
    (["predict", "colours", "new"], ["new/broken.png", "--on-bad-record skip:"]),
    (["predict", "colours", "small.npz"], ["[8, 8, 3]", "[3, 4, 4, 3]"]),
    (["predict", "colours", "scaled.npz"], ["pixels from 0 to 255", "scaled already"]),
    (["predict", "prices", "columns.csv"], ["columns.csv has no column 'rooms'", "city, size"]),
    (["predict", "prices", "x.npz"], ["run is of a table", "Received: x.npz"]),
    (["predict", "prices", "rows.csv", "--top", "2"], ["--top", "Leave it out"]),
    (["predict", "letters", "x.npz", "--checkpoint", "7"], ["checkpoint of step 7 is not in"]),
    (["predict", "words", "text.txt"], ["run is of text", "generate"]),
    (["generate", "words", "--prompt", "Über"], ["character 'Ü'", "alphabet"]),
    (["generate", "words", "--prompt", ""], ["--prompt", "at least one character"]),
    (["generate", "words"], ["--prompt", "--prompt-file", "required"]),
    (["generate", "words", "--prompt", "a", "--temperature", "-1"], ["--temperature", "at least 0", "-1.0"]),
    (["generate", "words", "--prompt", "a", "--top-k", "0"], ["--top-k", "at least 1", "Received: 0"]),
    (["generate", "words", "--prompt-file", "nothing.txt"], ["--prompt-file nothing.txt", "No such file"]),
    (["generate", "colours", "--prompt", "a"], ["not a language model", "'class_folders'"]),
    (["generate", "words", "--prompt", "a", "--checkpoint", "last"], ["best, newest, or the number", "'last'"]),
    (["predict", "letters", "x.npz", "--out", "none/x.csv"], ["--out", "folder that exists", "none/x.csv"]),
    (["predict", "letters", "x.npz", "--out", "/proc/x.csv"], ["--out /proc/x.csv cannot be written"]),
    (["predict", "letters", "x.npz", "-"], ["- stands for standard input, by itself"]),
    (["predict", "letters", "x.npz", "--on-bad-record", "skip"], ["raise or skip:N", "'skip'"]),
    (["predict", "letters", "x.npz", "--top", "2", "--probabilities"], ["leave out --top"]),
    (["predict", "torn", "new"], ["no preprocessing.json", "whole folder"]),
    (["evaluate", "colours", "--data-args", "path", "strange"], ["class 'pink'", "blue, green, red"]),
    (["evaluate", "colours", "--data-args", "path"], ["NAME VALUE pairs"]),
    (["evaluate", "prices", "--data-args", "path", "rows.csv"], ["no column 'price'"]),
    (["evaluate", "prices", "--data-args", "path", "others.csv", "target", "size"], ["target is 'price'"]),
    (["evaluate", "torn"], ["no preprocessing.json", "whole folder"]),
)


@pytest.fixture(scope="session")
def mistakes(home, elsewhere):
    """What each of MISTAKES is answered."""
    write_photos(elsewhere / "strange", ("green", "red"), 2)
    (elsewhere / "strange" / "green").rename(elsewhere / "strange" / "pink")
    np.savez(elsewhere / "small.npz", np.zeros((3, 4, 4, 3), np.uint8))
    np.savez(elsewhere / "scaled.npz", np.full((3, 8, 8, 3), 0.5, np.float32))
    (elsewhere / "columns.csv").write_text("city,size\nrome,50\n")
    shutil.copytree(home / "colours", home / "torn")
    (home / "torn" / "preprocessing.json").unlink()
    commands = [[verb, str(home / name), *rest] for (verb, name, *rest), _ in MISTAKES]
    return errors_of(commands, cwd=elsewhere)


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[" ".join(words) for words, _ in MISTAKES])
def test_mistakes_are_said(mistakes, number):
    assert all(part in mistakes[number] for part in MISTAKES[number][1]), mistakes[number]
