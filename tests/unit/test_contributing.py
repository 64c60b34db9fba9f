"""CONTRIBUTING.md and the rooms' docstrings show a newcomer what is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hvdtrain"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")
ROOMS = sorted(path for path in PACKAGE.iterdir() if path.is_dir() and list(path.glob("*.py")))
NAMED = set(re.findall(r"`([\w./]+/(?:\w+\.(?:py|sh|md))?)`", TEXT))


@pytest.mark.parametrize("path", sorted(path for path in NAMED if "NAME" not in path))
def test_files_and_folders_that_contributing_names_exist(path):
    assert (ROOT / path).exists() or (PACKAGE / path).exists()


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_says_what_it_holds_and_contributing_draws_it(room):
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
    assert len(docstring.splitlines()) >= 3, "what lives there, what it may import, where to start"
    assert re.search(rf"\b{room.name}/", TEXT)
    assert re.search(rf"\b{room.name}/", DESIGN)
