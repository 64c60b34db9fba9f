"""The environment of stubs that every test here has."""

from pathlib import Path

import pytest

from tests.unit.installation.stub_environment import Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)
