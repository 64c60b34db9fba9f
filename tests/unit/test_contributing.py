"""CONTRIBUTING.md and docs/design.md show a newcomer what is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hvdtrain"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and list(path.glob("*.py")))
DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([\w./]+/(?:\w+\.(?:py|sh|md))?)`", TEXT + DESIGN))


def test_files_and_folders_that_are_named_exist():
    named = [path for path in NAMED if "NAME" not in path]
    assert len(named) > 20
    assert [path for path in named if not ((ROOT / path).exists() or (PACKAGE / path).exists())] == []


def test_every_thread_of_a_rank_is_named():
    """Those that are given a name: all that are started but the pools that read data."""
    started = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r'"(hvdtrain-[a-z]+)"', _starts(path))}
    assert len(started) > 8
    assert sorted(started) == sorted(re.findall(r"^\| `(hvdtrain-\w+)` \|", DESIGN, re.MULTILINE))


def _starts(path):
    """The lines of a file that name a thread."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if re.search(r"name ?=|PoolExecutor", line))


def test_every_room_is_drawn():
    assert len(ROOMS) > 10
    assert [room for room in ROOMS if not re.search(rf"\b{room}/", TEXT)] == []
