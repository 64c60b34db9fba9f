"""Versions of libraries that hvdtrain is tested with."""

import configparser
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import pytest
from packaging.requirements import Requirement

from hvdtrain import compat

ROOT = Path(compat.__file__).parents[2]


def test_setup_allows_the_tested_versions_of_keras_and_no_others():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    required = map(Requirement, settings["options"]["install_requires"].split())
    (allowed,) = (each.specifier for each in required if each.name == "keras")
    first, last = compat.TESTED_KERAS
    assert set(str(allowed).split(",")) == {f">={first[0]}.{first[1]}", f"<{last[0]}.{last[1] + 1}"}
    assert Requirement(compat.KERAS_REQUIREMENT).specifier == allowed
    assert keras.__version__ in allowed


@pytest.mark.parametrize(("installed", "warns"), [("3.1.0", True), ("3.999.0", True), ("4.0", True), (None, False)])
def test_another_version_is_warned_about_by_name(installed, warns, monkeypatch):
    monkeypatch.setattr(compat, "version", lambda name: installed or keras.__version__)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compat.warn_of_untested_keras()
    (first, last) = (".".join(map(str, each)) for each in compat.TESTED_KERAS)
    expected = [f"tested with Keras {first} to {last}. Installed: Keras {installed}."] if warns else []
    assert len(caught) == len(expected)
    assert all(text in str(each.message) for text, each in zip(expected, caught, strict=True))


def test_it_imports_no_library_before_one_is_needed():
    code = "import sys, hvdtrain.compat, hvdtrain.compat.tensorflow, hvdtrain.compat.horovod; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"tensorflow", "keras", "horovod", "mpi4py"} & set(found.stdout.split())
