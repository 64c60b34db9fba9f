"""The scripts in benchmarks/ are run by hand: here they are held to find what they import."""

import importlib.util
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_finds_what_it_imports(script, monkeypatch):
    monkeypatch.syspath_prepend(script.parent)
    spec = importlib.util.spec_from_file_location(f"benchmarks_{script.stem}", script)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
