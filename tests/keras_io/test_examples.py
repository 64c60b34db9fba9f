"""The examples of keras.io train on ranks as by Keras alone, or as docs/keras_support.md says."""

import json
import re

import pytest

from tests.keras_io.__main__ import BEGIN, END, PAGE, compared, own_code, title, written
from tests.keras_io.examples import EXAMPLES
from tests.launching import Job, launched

EVERYDAY = (
    "going_lower_level",
    "logistic_endpoint",
    "variational_autoencoder",
    "momentum_contrast",
    "deep_q_network",
    "whole_graph_features",
)
"""One by its kind: a step with a validation, a layer with a loss, draws, own states, a loop, all samples at once."""
TEXT = PAGE.read_text(encoding="utf-8")


def test_examples_of_each_kind_train_as_by_keras_alone(tmp_path):
    words = launched("mpirun", 2, "-m", "tests.keras_io.train", "both", str(tmp_path), *EVERYDAY)
    done = Job(words, cwd=PAGE.parents[1], PYTHONPATH=str(PAGE.parents[1])).expect(timeout=300)
    found = dict(json.loads(line) for line in re.findall(r"^RESULT (.*)$", done.out, re.MULTILINE))
    assert found == dict.fromkeys(EVERYDAY, "equal"), done.text[-3000:]


def test_the_table_of_the_docs_has_all_examples():
    table = TEXT.partition(BEGIN)[2].partition(END)[0]
    rows = re.findall(r"^\| (.*?) \| (.*?) \| ", table, re.MULTILINE)[1:]
    assert rows == [(title(each), own_code(each)) for each in EXAMPLES.values()]


@pytest.mark.extended  # seventy models, each trained four times
def test_the_table_of_the_docs_is_what_comes_out(tmp_path):
    results = compared(list(EXAMPLES), str(tmp_path))
    assert written(TEXT, results) == TEXT, "python -m tests.keras_io --table docs/keras_support.md writes it anew"
