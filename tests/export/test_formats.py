"""Every format in every precision that it holds, of an image classifier and of a language model, in its own runtime."""

import json
import re
import sys

import numpy as np
import pytest

from hvdtrain.export.formats import FORMATS
from tests.launching import Job, hvdtrain

OTHERS = {name: each for name, each in FORMATS.items() if each.packages}
"""Formats that need packages of their own; `tests/entry/test_export.py` has the rest."""
RUNS = {
    "digits": ["digits", "--epochs", "4"],
    "lm": ["lm_synthetic", "--max-steps", "60"],
}
NARROW = {
    "narrow digits": [*RUNS["digits"], "--precision", "mixed_float16"],
    "narrow lm": [*RUNS["lm"], "--precision", "mixed_bfloat16"],
}
"""The same, trained in 16 bits, which no runtime of these computes in."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    for each in OTHERS.values():
        for package in each.packages:
            pytest.importorskip(package, reason=f"{package} is not installed: see launch/lib/overlay.sh")
    folder = tmp_path_factory.mktemp("home")
    for name, words in {**RUNS, **NARROW}.items():
        hvdtrain("none", 1, *words, "--run-dir", name, "--plots", "False", cwd=folder)
    return folder


def cells():
    for name in RUNS:
        for mode in dict.fromkeys(mode for each in OTHERS.values() for mode in each.modes):
            if name == "lm" or mode not in ("gptq", "awq"):
                yield name, mode


@pytest.mark.parametrize(("name", "mode"), [*cells(), *((name, "float32") for name in NARROW)])
def test_files_return_what_the_model_returns(home, name, mode):
    formats = [each for each, format_ in OTHERS.items() if mode in format_.modes]
    words = ["--format", *formats, "--quantize", mode, "--calibrate", "32", "--samples", "128"]
    job = hvdtrain("none", 1, "export", name, *words, cwd=home, code=None)
    models = json.loads((home / name / "export" / "export.json").read_text())["models"]
    found = {each["name"]: each for each in models if each["precision"] == mode}
    before = next(each for each in models if (each["name"], each["precision"]) == ("model", "float32"))
    for each in formats:
        assert found[each]["fault"] == "", found[each]
        assert found[each]["accuracy"] >= before["accuracy"] - 0.01
        assert np.isfinite(found[each]["ms"])
    assert job.code == 0, job.text
    if mode in ("float16", "int8") and name == "digits":
        assert all(found[each]["bytes"] < 0.75 * before["bytes"] for each in formats)


def test_a_runtime_that_computes_something_else_is_found_out(home):
    """LiteRT's 4-bit kernels of a narrow layer, as of 2.3: what the check is for."""
    script = """
import keras
from keras import layers

keras.utils.set_random_seed(0)
stack = [keras.Input((8, 8, 1)), layers.Conv2D(16, 3, activation="relu"), layers.Flatten()]
keras.Sequential([*stack, layers.Dense(64, "relu"), layers.Dense(10, "softmax")]).save("narrow.keras")
"""
    Job([sys.executable, "-c", script], cwd=home).expect()
    words = ["--format", "onnx", "litert", "--quantize", "int4"]
    job = hvdtrain("none", 1, "export", "narrow.keras", *words, cwd=home, code=1)
    assert re.search(
        r"not what was trained: export/model-int4.tflite: its outputs differ by \S+ of the largest", job.out
    )
    assert "model-int4.onnx:" not in job.out
