"""Packages that are out of sight for a while."""

import importlib
import sys

import pytest

from hvdtrain.runtime.lean_import import left_out

NAME = "colorsys"  # of the standard library, and nobody here uses it


def test_a_package_is_out_of_sight_within_the_body_only(monkeypatch):
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with left_out(NAME), pytest.raises(ImportError):
        importlib.import_module(NAME)
    assert importlib.import_module(NAME).rgb_to_hls


def test_one_that_was_imported_before_stays(monkeypatch):
    before = importlib.import_module(NAME)
    with left_out(NAME):
        assert importlib.import_module(NAME) is before
    assert sys.modules[NAME] is before


def test_it_comes_back_after_an_error(monkeypatch):
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(RuntimeError), left_out(NAME):
        raise RuntimeError
    assert importlib.import_module(NAME).rgb_to_hls
