"""A user's own model and data, from files in the folder where the command is typed."""

import re
import textwrap

import pytest

from tests.launching import hvdtrain, summary_of, use_all

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("user_code")]  # they share runs

MODEL = """\
    import keras

    def build(sample_shape, classes, width=16):
        return keras.Sequential([
            keras.Input(sample_shape),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(classes, activation="softmax"),
        ])

    build.loss = "sparse_categorical_crossentropy"
    build.metrics = ["accuracy"]

    def broken():
        raise OSError("no such weights")

    def nothing():
        pass
"""
DATA = """\
    import numpy as np

    def build(samples=512, shift=0):
        x = np.random.random((samples, 4)).astype("float32")
        y = x.argmax(axis=1) + shift
        return (x[64:], y[64:]), (x[:64], y[:64])

"""
STREAMS = """\
    import numpy as np
    import tensorflow as tf

    X = np.random.default_rng(0).random((256, 4)).astype("float32")
    SAMPLES = tf.data.Dataset.from_tensor_slices((X, X.argmax(axis=1))).map(lambda x, y: (2 * x, y))

    def endless():
        return SAMPLES.shuffle(256, seed=1).repeat(), SAMPLES.repeat().batch(50)

    endless.classes = ["a", "b", "c", "d"]
"""
OWN = ("train", "--model", "mypkg.mymodel:build", "--data", "mypkg.mydata:build")
STREAMED = ("--data", "mypkg.streams:endless", "--batch", "32", "--schedule", "constant")
STREAMED += ("--steps-per-epoch", "5", "--validation-steps", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    package = home / "mypkg"
    package.mkdir()
    (package / "mymodel.py").write_text(textwrap.dedent(MODEL))
    (package / "mydata.py").write_text(textwrap.dedent(DATA))
    (package / "streams.py").write_text(textwrap.dedent(STREAMS))
    return home


@pytest.fixture(scope="module")
def evaluated(folder):
    """What was printed of two runs on two ranks, one of which was resumed; others were made on one rank."""
    short, two_epochs = ("--epochs", "1", "--run-dir"), ("--epochs", "2", "--run-dir")
    own, stream = (*OWN, "--batch", "32"), (*OWN, *STREAMED)
    arguments = ("--model-args", "width", "8", "--data-args", "samples", "128", "shift", "1")
    arguments += ("--metrics", "SparseTopKCategoricalAccuracy")
    # The arguments of lm_synthetic are for its model and data.
    of_a_recipe = ("train", "lm_synthetic", *OWN[1:], *two_epochs, "recipe")
    alone = [(*own, *short, "one"), (*stream, *two_epochs, "stream-one"), (*OWN, *arguments, *short, "arguments")]
    use_all("none", 1, [*alone, of_a_recipe], cwd=folder)
    use_all("mpirun", 2, [(*own, *short, "two"), (*stream, *short, "stream-two")], cwd=folder)
    use_all("mpirun", 2, [("train", "--resume", "stream-two", "--epochs", "2")], cwd=folder)
    return use_all("none", 1, [("evaluate", "two"), ("evaluate", "stream-two")], cwd=folder)


def test_own_code_trains_alike_on_one_rank_and_on_two(folder, evaluated):
    one, two = summary_of(folder / "one"), summary_of(folder / "two")
    assert (one["steps"], two["steps"], two["world_size"]) == (14, 14, 2)
    assert (one["parameters"], two["parameters"]) == (4 * 16 + 16 + 16 * 4 + 4,) * 2
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-4)
    assert two["val_accuracy"] == pytest.approx(one["val_accuracy"], abs=1 / 64 + 1e-9)
    assert f"val_accuracy {two['val_accuracy']:.4f}" in evaluated


def test_arguments_loss_and_metrics_are_the_users_and_those_of_a_recipe_are_not(folder, evaluated):
    summary = summary_of(folder / "arguments")
    assert summary["parameters"] == 4 * 8 + 8 + 8 * 5 + 5  # labels 0 to 4
    assert "val_accuracy" not in summary
    assert 0 < summary["val_sparse_top_k_categorical_accuracy"] <= 1
    assert summary["steps"] == 1
    assert summary_of(folder / "recipe")["epochs"] == 2


@pytest.mark.parametrize(("controller", "size"), [("none", 1), ("mpirun", 2)])
def test_its_own_exception_shows_its_own_line(folder, controller, size):
    words = ("--model", "mypkg.mymodel:broken", "--loss", "mse")
    job = hvdtrain(controller, size, *OWN, *words, cwd=folder, code=None)
    assert job.code not in (0, 2)
    assert job.err.count("OSError: no such weights") == 1, job.text[-4000:]
    assert re.search(r'mypkg/mymodel\.py", line \d+, in broken', job.err)


def test_data_that_never_end_are_streamed_resumed_and_evaluated(folder, evaluated):
    one, two = summary_of(folder / "stream-one"), summary_of(folder / "stream-two")
    assert (one["steps"], two["steps"], two["world_size"]) == (10, 10, 2)
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-4)
    assert f"val_accuracy {two['val_accuracy']:.4f}  (streamed" in evaluated
