"""Keras' own tests of callbacks and models, which come with its wheel, through `hvdtrain.Trainer` in one process.

`docs/keras_support.md` has the ones that fail, each with its reason.
"""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import keras
import pytest

from tests.launching import run

ROOT = Path(__file__).parents[2]
SOURCES = Path(keras.__file__).parent / "src"
CALLBACKS = [
    "backup_and_restore",
    "callback",
    "csv_logger",
    "early_stopping",
    "lambda_callback",
    "learning_rate_scheduler",
    "model_checkpoint",
    "reduce_lr_on_plateau",
    "swap_ema_weights",
    "terminate_on_nan",
    "tensorboard",
]
MODELS = ("model", "functional", "sequential")
FILES = [SOURCES / "callbacks" / f"{name}_test.py" for name in CALLBACKS] + [
    SOURCES / "models" / f"{name}_test.py" for name in MODELS
]
MARKERS = ("requires_trainable_backend", "large", "multi_device", "skip_if_not_backend")
LEAST = 150
"""Keras has more tests than this in these files."""


def outcomes_of(folder, *plugin):
    """Return whether each test passed, by its name; skipped ones are left out."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n" + "".join(f"    {name}\n" for name in MARKERS))
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    command += ["-c", "pytest.ini", "--rootdir", str(folder), "--junitxml=outcomes.xml", *plugin]
    run([*command, *map(str, FILES)], cwd=folder, timeout=600, code=None, PYTHONPATH=str(ROOT))
    found = {}
    for case in ET.parse(folder / "outcomes.xml").getroot().iter("testcase"):
        if case.find("skipped") is None:
            name = f"{case.get('classname').rsplit('.', 1)[-1]}.{case.get('name')}"
            found[name] = case.find("failure") is None and case.find("error") is None
    return found


@pytest.mark.extended
def test_keras_own_tests_pass_but_for_those_with_a_reason(tmp_path):
    outcomes = outcomes_of(tmp_path, "-p", "tests.keras_suite.routed")
    assert len(outcomes) > LEAST, outcomes
    page = (ROOT / "docs" / "keras_support.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| `(\w+Test\.\w+)`", page, re.M))
    failed = {name for name, passed in outcomes.items() if not passed}
    assert failed == known, f"not in the table: {sorted(failed - known)}; pass by now: {sorted(known - failed)}"
