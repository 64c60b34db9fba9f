"""What a training cannot begin with: other layers, inputs that mean something else, outputs that are no logits."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.run import Config
from hvdtrain.config.tuning import TuningConfig
from hvdtrain.data.preprocessing import Preprocessing, TextInputs
from hvdtrain.data.registry import load_splits
from hvdtrain.recipes import recipe
from hvdtrain.runs.description import RunDescription
from hvdtrain.runs.tuning import Earlier, begin_with, check_prepared_alike, check_teacher, taught
from hvdtrain.state.structure import structure_of

SPLITS = load_splits(recipe("digits").data, 0)
INPUTS = {"dtype": "float32", "shape": [8, 8, 1]}
DIGITS = RunDescription("digits", INPUTS, 10, "logits", SPLITS.preprocessing)
TEXT = TextInputs("chars", 8, alphabet="ab")


def teacher(**changes):
    described = replace(DIGITS, **changes)
    return Earlier(option="--teacher", place=Path("t"), config=Config("digits"), description=described)


def test_a_teacher_of_the_same_data_is_taken():
    check_teacher(teacher(), SPLITS)


@pytest.mark.parametrize(
    ("described", "problem"),
    [
        ({"outputs": "values"}, "--teacher t must return logits of classes. Received: a model of values."),
        ({"classes": 9}, "of another kind: their classes is not that of the data"),
        ({"inputs": {**INPUTS, "shape": [4, 4, 1]}}, "of another kind: their shape is not that of the data"),
        ({"preprocessing": Preprocessing()}, "of another kind: their preparation of images is not that of the data"),
        ({"preprocessing": Preprocessing(text=TEXT)}, "was trained on another text, whose tokens mean something else"),
    ],
)
def test_a_teacher_of_something_else_is_refused(described, problem):
    with pytest.raises(ConfigError, match=problem):
        check_teacher(teacher(**described), SPLITS)


def test_a_teacher_of_weighted_samples_is_refused():
    train = SimpleNamespace(spec=(*SPLITS.train.spec, None))
    with pytest.raises(ConfigError, match="takes no weights of samples, and the data have some"):
        check_teacher(teacher(), replace(SPLITS, train=train))


def test_another_tokenizer_is_found_by_what_it_holds(tmp_path):
    files = [tmp_path / name for name in ("one", "same", "other")]
    for file, content in zip(files, (b"1", b"1", b"2"), strict=True):
        file.write_bytes(content)
    one, same, other = (
        replace(SPLITS.preprocessing, image=None, text=replace(TEXT, model=str(file))) for file in files
    )
    check_prepared_alike(teacher(preprocessing=one), replace(SPLITS, preprocessing=same))
    with pytest.raises(ConfigError, match="on another text"):
        check_prepared_alike(teacher(preprocessing=one), replace(SPLITS, preprocessing=other))


def model(units=8, **options):
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(units, **options), keras.layers.Dense(3)])


def test_weights_of_the_same_layers_are_taken_and_of_others_refused():
    mine, trained = model(), model()
    begin_with(mine, trained, "--weights w")
    for one, other in zip(mine.weights, trained.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ConfigError, match=r"--weights w is of another model: layers/0/kernel: it has \[8, 4\], needed"):
        begin_with(mine, model(4), "--weights w")
    with pytest.raises(ConfigError, match=r"layers/0/bias: it has nothing, needed \[8\]"):
        begin_with(mine, model(use_bias=False), "--weights w")
    with pytest.raises(ConfigError, match=r"layers/0/bias: it has \[8\], needed nothing"):
        begin_with(model(use_bias=False), trained, "--weights w")


def test_a_student_keeps_the_places_of_its_weights():
    student = model()
    paths = structure_of(student).by_path(student.weights)
    distiller = taught(student, model(16), TuningConfig(teacher="t"))
    found = structure_of(distiller).by_path(distiller.weights)
    assert {path: found[path] for path in found if not path.startswith("teacher/")} == paths
    assert distiller.whole_parameters == student.count_params()
    assert len(found) == 2 * len(paths)
    with pytest.raises(ConfigError, match="--teacher t: Teacher and student output shapes are incompatible"):
        taught(student, keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]), TuningConfig(teacher="t"))
