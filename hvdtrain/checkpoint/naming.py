"""Names of checkpoints in their folder: complete and replaced ones."""

from pathlib import Path

from hvdtrain.checkpoint import index

PREFIX = "step-"
REPLACED = ".replaced"
"""Suffix of a checkpoint while another one of the same step takes its place."""


def name_of(step: int) -> str:
    """Return the name of the checkpoint after `step` steps."""
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of the checkpoint at `path`."""
    return int(path.name.removeprefix(PREFIX).removesuffix(REPLACED))


def step_named(path: Path) -> int | None:
    """Return the step in the name of a folder; None if it is not named like a checkpoint."""
    number = path.name.removeprefix(PREFIX).removesuffix(REPLACED)
    return int(number) if path.name.startswith(PREFIX) and number.isdecimal() else None


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, the newest last."""
    return [path for path in numbered(folder) if (path / index.NAME).is_file()]


def numbered(folder: Path) -> list[Path]:
    """Return the folders in `folder` that are named like checkpoints, the newest last."""
    found = []
    for path in folder.glob(f"{PREFIX}*"):
        step = step_named(path)
        if step is not None and path.is_dir():
            found.append((step, not path.name.endswith(REPLACED), path))
    return [path for *_, path in sorted(found)]


def checkpoints_at(folder: Path) -> Path:
    """Return the folder of checkpoints at `folder`: itself, or that of the run in it."""
    of_run = folder / "checkpoints"
    return of_run if of_run.is_dir() and not numbered(folder) else folder
