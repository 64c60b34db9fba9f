"""Keras' own tests of callbacks, models and its trainer, which its wheel has, by `hvdtrain.Trainer` in one process.

`docs/keras_support.md` has the ones that fail, each with its reason.
"""

import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import keras
import pytest

from tests.launching import Job

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
MODEL_THAT_IS_A_LAYER = """\
class Trainer(models.Model):
    def __init__(self):
        models.Model.__mro__[1].__init__(self)

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        layers = [each for each in cls.__mro__ if each not in models.Model.__mro__[:3]]
        for name in ("build", "call"):
            setattr(cls, name, next(vars(each)[name] for each in layers if name in vars(each)))


"""
"""What models in the tests of Keras' trainer inherit beside a layer, since methods of models are routed."""
ENDLESS = ("TestTrainer.test_stop_loop_fit",)
"""Never ends: its generator has no end, and Keras would not count its batches."""
LEFT_OUT = ("jax", "grain", "torch", "test_loss_scaling_prevents_underflow", *(name.split(".")[1] for name in ENDLESS))
"""Words in names of tests: of packages that are not there, and of one with a name that models may not use."""
MARKERS = ("requires_trainable_backend", "large", "multi_device", "skip_if_not_backend")
LEAST = 320
"""Keras has more tests than this in these files."""


def trainer_tests(folder):
    """Write the tests of Keras' trainer for models, and return the file."""
    source = (SOURCES / "trainers" / "trainer_test.py").read_text(encoding="utf-8")
    before, chosen, rest = source.partition('if backend.backend() == "jax":\n')
    _, imported, tests = rest.partition("# A model is just a layer mixed in with a Trainer.\n")
    assert all((chosen, imported)), "the tests of Keras' trainer have another form"
    file = folder / "trainer_test.py"
    file.write_text(before.replace("import jax\n", "") + MODEL_THAT_IS_A_LAYER + tests, encoding="utf-8")
    return file


def outcomes_of(folder):
    """Return whether each test passed through `hvdtrain.Trainer`, by its name; skipped ones are left out."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n" + "".join(f"    {name}\n" for name in MARKERS))
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    command += ["-c", "pytest.ini", "--rootdir", str(folder), "--junitxml=outcomes.xml"]
    command += ["-p", "tests.keras_suite.routed", "-k", " and ".join(f"not {word}" for word in LEFT_OUT)]
    command += [*map(str, FILES), str(trainer_tests(folder))]
    Job(command, cwd=folder, PYTHONPATH=str(ROOT)).expect(code=None, timeout=600)
    found = {}
    for case in ET.parse(folder / "outcomes.xml").getroot().iter("testcase"):
        if case.find("skipped") is None:
            name = f"{case.get('classname').rsplit('.', 1)[-1]}.{case.get('name')}"
            found[name] = case.find("failure") is None and case.find("error") is None
    return found


@pytest.mark.extended
def test_keras_own_tests_pass_but_for_those_with_a_reason(tmp_path):
    outcomes = outcomes_of(tmp_path)
    assert len(outcomes) > LEAST, outcomes
    page = (ROOT / "docs" / "keras_support.md").read_text(encoding="utf-8")
    known = {
        name: int(count)
        for name, count in re.findall(r"^\| `(\w+Test\w*\.[\w*]+|Test\w+\.[\w*]+)` \| (\d+) \|", page, re.M)
    }
    failed = [name for name, passed in outcomes.items() if not passed] + list(ENDLESS)
    found = Counter(next((each for each in known if fnmatch(name, each)), name) for name in failed)
    assert found == known, failed
