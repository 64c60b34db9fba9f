"""Files that are what was trained, and every way in which one is not."""

import importlib
import resource
import signal
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from safetensors.numpy import save_file

import hvdtrain
from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.errors import CheckpointError, ConfigError, ExportError
from hvdtrain.data.preprocessing import ImageInputs, Preprocessing
from hvdtrain.export import formats, tensors
from hvdtrain.export.exporter import Quantization, Subject, export
from hvdtrain.export.formats import Format, checked
from hvdtrain.export.single import export_one
from hvdtrain.export.verify import Samples, difference

SUFFIXES = {"savedmodel": "", "keras": ".keras", "safetensors": ".safetensors"}
"""Of the formats that need no other package."""


def digits():
    keras.utils.set_random_seed(0)
    stack = [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.BatchNormalization()]
    return keras.Sequential([*stack, layers.Flatten(), layers.Dropout(0.5), layers.Dense(16, "relu"), layers.Dense(10)])


def attention():
    keras.utils.set_random_seed(0)
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    x = layers.Embedding(20, 16)(tokens)
    x = x + layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
    return keras.Model(tokens, layers.Dense(20)(layers.Dense(16, "gelu")(x)))


def several():
    keras.utils.set_random_seed(0)
    inputs = {"wide": keras.Input((3,), name="wide"), "deep": keras.Input((2, 4), name="deep")}
    shared = layers.Dense(4)
    x = layers.concatenate([shared(layers.Dense(4)(inputs["wide"])), layers.Flatten()(shared(inputs["deep"]))])
    return keras.Model(inputs, {"b": layers.Dense(2)(x), "a": layers.Dense(1)(x)})


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, inputs):
        return self.dense(inputs[0]) + self.dense(inputs[1])


def subject_of_digits(model):
    draws = np.random.default_rng(0)
    inputs = (draws.integers(0, 17, (40, 8, 8, 1)) / 16).astype(np.float32)
    samples = Samples(inputs, np.asarray(model(inputs, training=False)).argmax(-1))
    described = Preprocessing(image=ImageInputs(8, 8, 1, 16.0))
    return Subject(model, {"dtype": "float32", "shape": [8, 8, 1]}, samples, "logits", described)


@pytest.mark.parametrize(
    ("name", "build", "extended"),
    [
        pytest.param(name, build, False, marks=[pytest.mark.extended] if (name, build) not in kept else [])
        for kept in [{("savedmodel", several)}]  # weights in safetensors are written again by most tests below
        for name in SUFFIXES
        for build in (digits, attention, several)
    ],
)
def test_what_is_written_returns_what_the_model_returns(name, build, extended, tmp_path):
    written = export_one(build(), tmp_path / f"model{SUFFIXES[name]}", name)
    assert written.path.exists()
    assert written.difference < 1e-6
    assert written.ms > 0
    assert [path.name for path in tmp_path.iterdir()] == [written.path.name]


def test_pixels_and_accuracy_of_all_formats_that_need_no_package(tmp_path):
    targets = {name: tmp_path / f"model{suffix}" for name, suffix in SUFFIXES.items()}
    model = digits()
    (itself, *written), remarks = export(subject_of_digits(model), targets)
    assert (itself.name, itself.accuracy, remarks) == ("model", 1.0, [])
    assert [(each.name, each.accuracy, each.fault) for each in written] == [(name, 1.0, "") for name in SUFFIXES]
    assert written[0].takes == "pixels uint8 [n, 8, 8, 1]"
    served = tf.saved_model.load(str(targets["savedmodel"])).signatures["serving_default"]
    pixels = np.random.default_rng(1).integers(0, 17, (3, 8, 8, 1)).astype(np.uint8)
    (shares,) = served(tf.constant(pixels)).values()
    expected = keras.ops.softmax(model(pixels / np.float32(16), training=False))
    np.testing.assert_allclose(shares, expected, rtol=1e-5)


def test_fewer_bits_are_smaller_and_say_what_stays(tmp_path):
    targets = {"safetensors": tmp_path / "model.safetensors"}
    (before, after, written), remarks = export(subject_of_digits(digits()), targets, Quantization("int8"), points=0.2)
    assert (before.precision, after.precision, written.fault) == ("float32", "int8", "")
    assert written.difference == 0
    assert after.bytes < before.bytes / 2
    assert remarks == ["Not quantized: 1 Conv2D (40 weights stay float32)"]
    # Built again in this process: the same bits.
    loaded, inputs = tensors.load(targets["safetensors"]), subject_of_digits(digits()).samples.inputs
    again = digits()
    again.quantize("int8")
    np.testing.assert_array_equal(loaded(inputs, training=False), again(inputs, training=False))


def test_each_weight_is_written_once_and_from_its_own_memory(tmp_path, monkeypatch):
    words = keras.Input((2,), dtype="string")
    model = keras.Sequential([words, layers.StringLookup(vocabulary=["a", "b"]), layers.Embedding(3, 50_000)])
    export_one(model, tmp_path / "saved", "savedmodel", np.array([["a", "b"], ["b", "?"]]))
    stored = sum(file.stat().st_size for file in (tmp_path / "saved").rglob("*"))
    assert 600_000 < stored < 700_000
    taken = []
    monkeypatch.setattr(tensors, "save_file", lambda arrays, *_: taken.append(arrays))
    tensors.write(model, tmp_path / "m.safetensors", "{}")
    kernel = model.layers[-1].embeddings.value
    (written,) = (array for array in taken[0].values() if array.size == 150_000)
    assert np.shares_memory(written, np.asarray(tf.convert_to_tensor(kernel)))


@pytest.mark.extended
def test_layers_within_others_are_quantized_and_restored(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 20, (8, 6), np.int32)
    subject = Subject(attention(), {"dtype": "int32", "shape": [6]}, Samples(tokens))
    (*_, written), _ = export(subject, {"safetensors": tmp_path / "m.safetensors"}, Quantization("int4"))
    assert (written.fault, written.difference) == ("", 0.0)
    # Keras does not restore them, and its file is not left behind.
    subject = Subject(attention(), {"dtype": "int32", "shape": [6]}, Samples(tokens))
    (*_, written), _ = export(subject, {"keras": tmp_path / "m.keras"}, Quantization("int8"))
    assert "its runtime cannot run it: " in written.fault
    assert (written.path, [path.name for path in tmp_path.iterdir()]) == (None, ["m.safetensors"])


def test_a_model_of_a_class_of_its_own_shows_its_inputs_by_samples(tmp_path):
    model = Own()
    x = [np.ones((4, 5), np.float32), np.ones((4, 5), np.float32)]
    model(x)
    with pytest.raises(ConfigError, match="give export samples=x"):
        export_one(model, tmp_path / "own", "savedmodel")
    written = export_one(model, tmp_path / "own", "savedmodel", x)
    assert written.takes == "inputs_000 float32 [n, 5], inputs_001 float32 [n, 5]"
    assert written.difference < 1e-6


def spoilt(model, path):
    for weight in model.trainable_variables:
        weight.assign(weight * 1.2 + 0.01)
    model.save(path)


def test_a_file_of_other_weights_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setitem(
        formats.FORMATS,
        "keras",
        Format(".keras", lambda contents, path: spoilt(contents.trained, path), ("float32",), serves=False),
    )
    (_, written), _ = export(subject_of_digits(digits()), {"keras": tmp_path / "m.keras"})
    assert "of the largest from those of the same weights (at most 0.0001)" in written.fault
    with pytest.raises(ExportError, match=r"m2.keras in the format keras: its outputs differ by"):
        export_one(digits(), tmp_path / "m2.keras", "keras")


@pytest.mark.extended
def test_numbers_that_are_none_are_found_out(tmp_path):
    model = digits()
    model.layers[-1].bias.assign(np.full(10, 1e30))  # infinite in 16 bits
    targets = {"safetensors": tmp_path / "m.safetensors"}
    (_, written), _ = export(
        replace(subject_of_digits(model), samples=Samples(np.ones((4, 8, 8, 1), np.float32))),
        targets,
        Quantization("float16"),
    )
    assert written.fault.startswith("its outputs differ by inf of the largest")
    assert difference([np.array([np.nan])], np.array([1.0])) == np.inf
    assert difference([np.array([np.nan])], np.array([np.nan])) == 0


@pytest.mark.extended
def test_a_model_that_is_compiled_adapted_or_of_16_bits_goes_into_every_format(tmp_path):
    def own_loss(y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred), -1)

    inputs = keras.Input((4,))
    adapted = layers.Normalization()
    adapted.adapt(np.random.default_rng(0).normal(5, 3, (50, 4)))
    hidden = layers.Dense(8, dtype="bfloat16")(adapted(inputs))
    model = keras.Model(inputs, layers.Dense(2, dtype="bfloat16")(hidden))
    model.compile("adam", own_loss)
    for name in ("safetensors", "savedmodel"):
        written = export_one(model, tmp_path / f"m{SUFFIXES[name]}", name, [[1, 2, 3, 4.5], [5, 6, 7, 8]])
        assert written.takes == "inputs float32 [n, 4]"
        assert written.difference < 1e-2
    loaded = tensors.load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(loaded.layers[1].mean, adapted.mean)
    assert not loaded.compiled


@pytest.mark.usefixtures("session")
def test_a_model_of_mixed_precision_is_written_in_32_bits_and_goes_on_in_its_own(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8, "relu"), layers.Dense(2)])
    hvdtrain.Trainer(model, precision="mixed_bfloat16")
    assert model.layers[0].compute_dtype == "bfloat16"
    assert export_one(model, tmp_path / "m.safetensors", "safetensors").difference == 0
    assert {layer.dtype for layer in tensors.load(tmp_path / "m.safetensors").layers} == {"float32"}
    assert [layer.compute_dtype for layer in model.layers] == ["bfloat16", "bfloat16"]


def test_labels_and_weights_of_any_form_are_counted():
    shares = np.array([[0.9, 0.2], [0.4, 0.8]])
    assert Samples(None, np.array([0, 1])).accuracy(shares, "probabilities") == 1
    assert Samples(None, np.array([[1, 0], [1, 1]])).accuracy(shares, "binary_probabilities") == 0.75
    assert Samples(None, np.array([[0], [1]])).accuracy(shares, "binary_probabilities") == 1
    tokens = np.zeros((2, 3), int)
    scores = np.eye(2)[np.array([[0, 0, 1], [1, 1, 1]])]
    assert Samples(None, tokens).accuracy(scores, "logits") == pytest.approx(2 / 6)
    assert Samples(None, tokens, np.array([1.0, 0.0])).accuracy(scores, "logits") == pytest.approx(2 / 3)
    assert Samples(None, np.eye(2)[[0, 0]]).accuracy(shares, "probabilities") == 0.5


def test_a_loss_of_accuracy_is_found_out(tmp_path):
    subject = subject_of_digits(digits())
    hidden, last = subject.model.layers[-2:]
    # A number that no sample meets, beside which all others are rounded to zero.
    hidden.bias.assign(hidden.bias - 1e6 * np.eye(16)[0])
    last.kernel.assign(last.kernel + 1e3 * np.eye(16)[0][:, None])
    logits = np.asarray(subject.model(subject.samples.inputs, training=False))
    near = replace(subject, samples=Samples(subject.samples.inputs, logits.argmax(-1)))
    targets = {"safetensors": tmp_path / "m.safetensors"}
    (itself, *_, written), _ = export(near, targets, Quantization("int8"))
    assert written.accuracy < 0.9 < itself.accuracy == 1
    assert (
        written.fault
        == f"accuracy {written.accuracy:.4f} is {1 - written.accuracy:.4f} below the model's (at most 0.01)"
    )


class Sized(Own):
    def __init__(self, size):
        super().__init__()
        self.size = size


@pytest.mark.extended
def test_a_model_without_a_config_goes_into_formats_that_need_none(tmp_path):
    model, x = Sized(object()), [np.ones((4, 5), np.float32), np.ones((4, 5), np.float32)]
    model(x)
    with pytest.raises(ConfigError, match="--format safetensors needs the config of Sized: "):
        export_one(model, tmp_path / "m.safetensors", "safetensors", x)
    assert export_one(model, tmp_path / "own", "savedmodel", x).difference < 1e-6


class NoConfig(layers.Layer):
    def __init__(self, number):
        super().__init__(name="odd_one")
        self.number = number

    def call(self, inputs):
        return tf.ensure_shape(tf.numpy_function(lambda x: x * np.float32(3), [inputs], tf.float32), inputs.shape)

    def compute_output_shape(self, shape):
        return shape


def test_what_a_format_cannot_hold_is_said(tmp_path):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layers.Dense(2)(NoConfig(3)(inputs)))
    (_, written), _ = export(
        Subject(model, {"dtype": "float32", "shape": [3]}, Samples(np.ones((2, 3), np.float32))),
        {"savedmodel": tmp_path / "m"},
    )
    assert written.fault, "a function of Python goes into no file"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises((ConfigError, ExportError), match=r"m.safetensors"):
            export_one(digits(), tmp_path / "m.safetensors", "safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("onxx", "float32", "There is no format 'onxx'. Perhaps you meant: onnx."),
        ("savedmodel", "float16", "--format savedmodel does not hold float16: it holds float32, int8, int4, float8"),
        ("litert", "float8", "What holds float8: savedmodel, keras, safetensors."),
        ("keras", "int2", "What holds int2: none of the formats."),
    ],
)
def test_formats_that_do_not_exist_or_hold_a_precision_are_refused(name, mode, message):
    with pytest.raises(ConfigError) as refused:
        checked(name, mode)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "package"), [("onnx", "tf2onnx"), ("openvino", "openvino"), ("litert", "ai_edge_litert")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(name, package, monkeypatch):
    def missing(module):
        if module == package:
            raise ModuleNotFoundError(name=module)

    monkeypatch.setattr(importlib, "import_module", missing)
    words = f"--format {name} needs the package {package}, which is not installed: pip install 'hvdtrain[{name}]'"
    with pytest.raises(ConfigError, match=words.replace("[", r"\[").replace("]", r"\]")):
        checked(name, "float32")


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "m.keras").write_text("mine")
    with pytest.raises(ConfigError, match="exists, and nothing is overwritten"):
        export_one(digits(), tmp_path / "m.keras", "keras")
    with pytest.raises(ConfigError, match="cannot be written"):
        export_one(digits(), tmp_path / "m.keras" / "n.keras", "keras")


@pytest.mark.extended
def test_a_trainer_that_waits_for_its_variables_exports_nothing(tmp_path, session):
    first = hvdtrain.Trainer(Own(), "sgd", "mse", backend=SingleBackend(session))
    x = [np.ones((4, 5), np.float32), np.ones((4, 5), np.float32)]
    first.fit(x, np.ones((4, 3)), batch=4, verbose=0)
    first.save(tmp_path / "states")
    waiting = hvdtrain.Trainer(Own(), "sgd", "mse", backend=SingleBackend(session))
    waiting.restore(tmp_path / "states")
    with pytest.raises(
        ConfigError, match="The model has no variables yet: call fit, evaluate or predict before export"
    ):
        waiting.export(tmp_path / "served", samples=x)
    np.testing.assert_array_equal(waiting.predict(x), first.predict(x))
    assert waiting.export(tmp_path / "served", samples=x).difference < 1e-6
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(served.serve(x), first.predict(x), rtol=1e-6)


@pytest.mark.parametrize("change", [hvdtrain.prune, lambda model: hvdtrain.lora(model, 2, layers="dense")])
def test_what_is_a_part_of_training_is_taken_off_before(change, tmp_path):
    model = digits()
    change(model)
    with pytest.raises(
        ExportError, match=r"call hvdtrain.finish_pruning\(model\), or hvdtrain.merge_lora\(model\), before"
    ):
        export_one(model, tmp_path / "m.safetensors", "safetensors")
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_are_no_model_are_refused(tmp_path):
    save_file({"a": np.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="holds tensors, and no model"):
        tensors.load(tmp_path / "a.safetensors")
    config = tensors.config_of(digits())
    save_file({"a": np.zeros(2)}, tmp_path / "b.safetensors", {"keras": config, "quantized": "{}"})
    with pytest.raises(CheckpointError, match="is of another version of Keras or of the model's classes"):
        tensors.load(tmp_path / "b.safetensors")
