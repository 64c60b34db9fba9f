"""The names of checkpoints in their folder, and which of them are complete."""

import os
from pathlib import Path

from hvdtrain.checkpoint import manifest

PREFIX = "step-"
REPLACED = ".replaced"
"""Ends the name of a checkpoint while another one of the same step takes its place."""
DAMAGED = ".damaged"
"""Ends the name of a checkpoint that was set aside; a number follows where there are several of one step."""


def name_of(step: int) -> str:
    """Return the name of the checkpoint after `step` steps."""
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of the checkpoint at `path`."""
    return int(path.name.removeprefix(PREFIX).removesuffix(REPLACED))


def step_named(path: Path) -> int | None:
    """Return the step that the name of a folder tells; None if it is not one of a checkpoint."""
    number = path.name.removeprefix(PREFIX).removesuffix(REPLACED)
    return int(number) if path.name.startswith(PREFIX) and number.isdecimal() else None


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, the newest last."""
    return [path for path in numbered(folder) if (path / manifest.NAME).is_file()]


def numbered(folder: Path) -> list[Path]:
    """Return the folders in `folder` that have the name of a checkpoint, the newest last."""
    found = []
    for path in folder.glob(f"{PREFIX}*"):
        step = step_named(path)
        if step is not None and path.is_dir():
            found.append((step, not path.name.endswith(REPLACED), path))
    return [path for *_, path in sorted(found)]


def set_aside(path: Path) -> Path:
    """Give a damaged checkpoint a name by which it is no longer found, and return that.

    Raises:
        OSError: it cannot be renamed.
    """
    names = (f"{path.name}{DAMAGED}{number}" for number in ("", *range(2, 1000)))
    aside = next(place for place in map(path.with_name, names) if not place.exists())
    os.rename(path, aside)
    return aside


def damaged_ones(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder` that were set aside."""
    return sorted(folder.glob(f"{PREFIX}*{DAMAGED}*"))


def checkpoints_at(folder: Path) -> Path:
    """Return the folder of checkpoints that is meant by `folder`: itself, or that of the run in it."""
    of_run = folder / "checkpoints"
    return of_run if of_run.is_dir() and not numbered(folder) else folder
