import re
import sys
import textwrap

import keras
import numpy as np
import pytest

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError, on_command_line
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.user_code import arguments_for, is_user_code, load_attribute, load_function
from hvdtrain.data.registry import load_splits
from hvdtrain.data.sources.user_data import classes_of, is_one_hot
from hvdtrain.models.registry import build_model, model_family


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Make a module of a user's in an empty working folder; what was imported from there is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write_module(name, text=""):
        file = tmp_path / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    yield write_module
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")) or name.partition(".")[0] == "mypkg":
            del sys.modules[name]


# -- names --


def test_a_colon_makes_it_user_code():
    assert is_user_code("a.b:c")
    assert not is_user_code("small_cnn")


def test_the_working_folder_is_searched(write):
    write("mypkg.mymodel", "def build(): return 3")
    assert load_function("--model", "mypkg.mymodel:build")() == 3


@pytest.mark.parametrize("name", [":build", "mypkg:", "my pkg:build", "mypkg/mymodel.py:build", "a:b:c", "a..b:c"])
def test_another_form_of_a_name_is_refused(write, name):
    with pytest.raises(ConfigError) as raised:
        load_attribute("--model", name)
    assert str(raised.value) == f"--model takes PACKAGE.MODULE:ATTRIBUTE, with dots and no .py. Received: {name!r}."


@pytest.mark.parametrize(
    ("name", "missing", "hint"),
    [
        ("mypgk.mymodel:build", "mypgk", "Perhaps you meant: mypkg."),
        ("mypkg.mymodle:build", "mypkg.mymodle", "Perhaps you meant: mypkg.mymodel."),
        ("mypkg.mymodel.x:build", "mypkg.mymodel.x", ""),
        ("zzzzzz:build", "zzzzzz", ""),
    ],
)
def test_a_module_that_is_not_there_is_named_with_the_folder(write, tmp_path, name, missing, hint):
    write("mypkg.mymodel")
    with pytest.raises(ConfigError) as raised:
        load_attribute("--model", name)
    text = str(raised.value)
    assert f"there is no module {missing!r}. Modules are searched from the working folder, {tmp_path}," in text
    assert text.endswith(hint or "environment.")


def test_what_a_users_module_raises_keeps_its_traceback(write):
    file = write("mypkg.mymodel", "import mypkg.absent\n")
    with pytest.raises(ModuleNotFoundError, match=r"mypkg\.absent") as raised:
        load_attribute("--model", "mypkg.mymodel:build")
    assert str(file) in str(raised.traceback[-1].path) or any(str(file) == str(e.path) for e in raised.traceback)
    write("mypkg.other", "1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_attribute("--model", "mypkg.other:build")


def test_an_attribute_that_is_not_there_is_named_with_its_file(write):
    file = write("mypkg.mymodel", "def build_model(): ...")
    with pytest.raises(ConfigError) as raised:
        load_attribute("--model", "mypkg.mymodel:build_modle")
    assert f"({file}) has no 'build_modle'. Perhaps you meant: build_model." in str(raised.value)


def test_what_cannot_be_called_is_refused(write):
    write("mypkg.mymodel", "build = 3")
    with pytest.raises(ConfigError, match=r"--model mypkg.mymodel:build must be a function. Received: a int\."):
        load_function("--model", "mypkg.mymodel:build")


# -- signatures --

OFFERED = {"sample_shape": (3,), "classes": 5, "seed": 7}


def everything(sample_shape, classes, seed, width=8): ...
def nothing(): ...
def by_keyword(*, classes, rate=0.1): ...
def anything(**rest): ...
def needs_width(width): ...
def has_default(classes=2): ...


@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [
        (everything, {}, OFFERED),
        (everything, {"width": 3}, OFFERED | {"width": 3}),
        (everything, {"classes": 2}, OFFERED | {"classes": 2}),  # what the user says goes before the data
        (nothing, {}, {}),
        (by_keyword, {"rate": 1}, {"classes": 5, "rate": 1}),
        (anything, {"any": "thing"}, {"any": "thing"}),
        (needs_width, {"width": 4}, {"width": 4}),
        (has_default, {}, {"classes": 5}),
        (max, {}, {}),  # written in C
    ],
)
def test_a_function_is_given_what_it_names(function, given, expected):
    assert arguments_for("--model", "m:f", function, OFFERED, given) == expected


def test_what_the_data_do_not_tell_is_left_to_the_default():
    assert arguments_for("--model", "m:f", has_default, {"classes": None}, {}) == {}


def positional(classes, /): ...


@pytest.mark.parametrize(
    ("function", "given", "answer"),
    [
        (
            needs_width,
            {},
            "takes (width); width would have no value. It is called with those of (sample_shape, classes",
        ),
        (positional, {}, "takes (classes, /); classes would have no value."),
        (everything, {"wdth": 3}, "--model m:f takes no argument 'wdth'. Perhaps you meant: width."),
        (nothing, {"width": 3}, "--model m:f takes no argument 'width'."),
        (everything, {"width": "3"}, "The argument 'width' of --model m:f must be int. Received: '3'."),
    ],
)
def test_a_signature_that_does_not_fit_is_shown_with_what_there_is(function, given, answer):
    with pytest.raises(ConfigError) as raised:
        arguments_for("--model", "m:f", function, OFFERED, given)
    assert answer in str(raised.value)


def test_a_value_that_the_data_do_not_tell_is_named():
    with pytest.raises(
        ConfigError, match=r"classes would have no value\. The data do not specify classes\. .*--model-args"
    ):
        arguments_for("--model", "m:f", everything, {**OFFERED, "classes": None}, {})


# -- models --

MODEL = """
import keras
import numpy as np

def build(sample_shape, classes, width=4):
    return keras.Sequential([
        keras.Input(sample_shape), keras.layers.Dense(width), keras.layers.Dense(classes, activation="softmax")])

def fixed():
    return keras.Sequential([keras.layers.Dense(2, activation="softmax")])
fixed.loss = "mse"
fixed.metrics = ["mae"]

def logits(sample_shape, classes):
    return keras.Sequential([keras.Input(sample_shape), keras.layers.Dense(classes, name="last")])

class Mine(keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.dense = keras.layers.Dense(classes)
    def call(self, x):
        return self.dense(x)

def nothing(): ...
def compiled():
    model = fixed()
    model.compile("sgd", "mse")
    return model
def broken():
    raise OSError("no such weights")
made = fixed()

def half_squares(y_true, y_pred):
    return keras.ops.mean((y_true - y_pred) ** 2, axis=-1) / 2
from_logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""


@pytest.fixture
def module(write):
    return write("mypkg.mymodel", MODEL)


def model_of(function, loss="mse", seed=0, metrics=None, **arguments):
    config = ModelConfig(f"mypkg.mymodel:{function}", arguments, loss, metrics)
    return build_model(config, (3,), 5, seed)


def test_a_users_model_is_built_for_the_data(module):
    model = model_of("build", width=6)
    assert model.count_params() == 3 * 6 + 6 + 6 * 5 + 5
    assert model_of("build", classes=2, width=6).output_shape == (None, 2)  # what the user says goes first
    assert model_of("Mine")(np.zeros((2, 3))).shape == (2, 5)


def test_plain_layers_start_as_the_seed_says(module):
    first, again, other = (model_of("build", seed=seed).get_weights() for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))


def test_loss_and_metrics_come_from_options_or_from_the_function(module):
    said = model_family(ModelConfig("mypkg.mymodel:fixed"))
    assert (said.loss(), said.metrics()) == ("mse", ["mae"])
    config = ModelConfig("mypkg.mymodel:fixed", {}, "mypkg.mymodel:half_squares", ("accuracy",))
    family = model_family(config)
    assert family.loss().__name__ == "half_squares"
    assert family.metrics() == ["accuracy"]
    named = model_family(ModelConfig("mypkg.mymodel:build", loss="sparse_categorical_crossentropy"))
    assert named.loss().__name__ == "sparse_categorical_crossentropy"
    assert named.metrics() == []


@pytest.mark.parametrize("loss", ["mypkg.mymodel:from_logits", "mse"])
def test_losses_of_logits_take_a_last_layer_without_activation(module, loss):
    assert model_of("logits", loss).count_params() == 20
    assert model_of("build", "sparse_categorical_crossentropy").count_params() == 3 * 4 + 4 + 4 * 5 + 5


@pytest.mark.parametrize(
    ("function", "loss", "answer"),
    [
        ("build", None, "says nothing of its loss: give --loss NAME"),
        ("build", None, 'or write build.loss = "NAME" below the function'),
        ("build", "spare_categorical_crossentropy", "Perhaps you meant: sparse_categorical_crossentropy."),
        ("build", "mypkg.mymodel:half", "has no 'half'. Perhaps you meant: half_squares."),
        (
            "nothing",
            "mse",
            "mypkg.mymodel:nothing must return a keras.Model. Received: None, of type builtins.NoneType",
        ),
        ("compiled", "mse", "returns a compiled model"),
        ("made", "mse", "mypkg.mymodel:made is a model: name a function that returns it."),
        ("logits", "sparse_categorical_crossentropy", "the model's last layer 'last' has no activation"),
        ("logits", "SparseCategoricalCrossentropy", "expects probabilities"),
    ],
)
def test_what_makes_no_trainable_model_is_refused(module, function, loss, answer):
    with pytest.raises(ConfigError) as raised:
        model_of(function, loss)
    assert answer in on_command_line(raised.value.message)


def test_what_a_users_builder_raises_keeps_its_traceback(module):
    with pytest.raises(OSError, match="no such weights") as raised:
        model_of("broken")
    assert str(raised.traceback[-1].path) == str(module)


# -- data --

DATA = """
import numpy as np

def build(count=8, seed=0):
    x = np.random.default_rng(seed).random((count, 3)).astype("float32")
    y = np.arange(count) % 4
    return (x, y), (x[:2], y[:2])

def drawn():
    x = np.random.random((4, 3))
    return (x, x), (x, x)

def nested():
    x = {"a": np.zeros((4, 2)), "b": np.zeros((4, 3, 1))}
    y = np.zeros(4)
    return [x, y, y], [x, y, y]

def ours():
    from hvdtrain.data.digits import load
    return load()

def nothing(): ...
def unsplit():
    return np.zeros((4, 3)), np.zeros(4)
def bare():
    return (np.zeros((4, 3)),), (np.zeros((4, 3)),)
def uneven():
    return (np.zeros((4, 3)), np.zeros(5)), (np.zeros((4, 3)), np.zeros(4))
def broken():
    raise OSError("no such file")
"""


@pytest.fixture
def data(write):
    file = write("mypkg.mydata", DATA)

    def load(function, seed=0, **arguments):
        return load_splits(DataConfig(f"mypkg.mydata:{function}", arguments), seed)

    load.file = str(file)
    return load


def test_a_users_arrays_tell_shape_and_classes(data):
    splits = data("build", count=6)
    assert (splits.train.size, splits.validation.size, splits.sample_shape, splits.classes) == (6, 2, (3,), 4)
    nested = data("nested")
    assert (nested.sample_shape, nested.classes) == ({"a": (2,), "b": (3, 1)}, None)
    assert len(nested.train.elements) == 3
    assert data("ours").train.name == "digits (training)"


def test_what_a_function_draws_is_a_function_of_the_seed(data):
    for function in ("build", "drawn"):
        first, again, other = (data(function, seed=seed).train.elements[0].numpy() for seed in (1, 1, 2))
        assert (first == again).all()
        assert (first != other).all()


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        ("nothing", "mypkg.mydata:nothing must return (train, validation), each (inputs, targets) or (inputs, targets"),
        ("nothing", "of arrays, or a tf.data.Dataset, PyDataset or generator of them. Received: None."),
        ("unsplit", "Received: tuple of 2 (ndarray of shape (4, 3), ndarray of shape (4,))."),
        ("bare", "Received: tuple of 2 (tuple of 1 (ndarray of shape (4, 3)), tuple of 1 (ndarray of shape (4, 3)))."),
        ("uneven", "The arrays of --data mypkg.mydata:uneven (training) differ in length: 4, 5 samples."),
    ],
)
def test_what_makes_no_data_is_refused(data, function, answer):
    with pytest.raises(DataError) as raised:
        data(function)
    assert answer in str(raised.value)


def test_what_a_users_data_function_raises_keeps_its_traceback(data):
    with pytest.raises(OSError, match="no such file") as raised:
        data("broken")
    assert str(raised.traceback[-1].path) == data.file


def test_arguments_of_a_data_function_are_checked(data):
    with pytest.raises(
        ConfigError, match=r"--data mypkg.mydata:build takes no argument 'cuont'. Perhaps you meant: count"
    ):
        data("build", cuont=3)


class Source:
    def __init__(self, targets):
        self.elements = (None, keras.tree.map_structure(keras.ops.convert_to_tensor, targets))


@pytest.mark.parametrize(
    ("targets", "classes"),
    [
        ([np.array([0, 3, 1]), np.array([4, 0])], 5),  # validation may hold more
        ([np.array([[0], [2]], "uint8")], 3),
        ([np.array([[0, 5], [2, 1]])], 6),  # sequences
        ([np.eye(4, dtype="float32")], 4),
        ([np.eye(4, dtype="int32")], 4),  # one-hot, not labels 0 and 1
        ([np.array([0.5, 1.5])], None),
        ([np.array([True, False])], None),
        ([{"a": np.array([1]), "b": np.array([2])}], None),
    ],
)
def test_classes_are_counted_where_targets_are_labels(targets, classes):
    assert classes_of([Source(each) for each in targets]) == classes


def test_one_hot_rows_hold_a_single_one():
    assert is_one_hot(np.eye(3))
    for other in (
        np.ones((2, 2)),
        np.zeros((2, 2)),
        np.eye(3) * 2,
        np.eye(1),
        np.array([1, 0]),
        np.array([["a", "b"]]),
    ):
        assert not is_one_hot(other)


def test_the_message_for_a_loss_is_not_a_pattern():
    # `Received` must show the name as given, whatever it holds.
    with pytest.raises(ConfigError, match=re.escape("Keras has no loss '[a-z'")):
        model_family(ModelConfig("mlp", loss="[a-z"))
