"""The names of checkpoints in their folder, and which of them are complete."""

from pathlib import Path

from hvdtrain.checkpoint import manifest

PREFIX = "step-"
REPLACED = ".replaced"
"""Ends the name of a checkpoint while another one of the same step takes its place."""


def name_of(step: int) -> str:
    """Return the name of the checkpoint after `step` steps."""
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of the checkpoint at `path`."""
    return int(path.name.removeprefix(PREFIX).removesuffix(REPLACED))


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, the newest last."""
    found = []
    for path in folder.glob(f"{PREFIX}*"):
        number = path.name.removeprefix(PREFIX).removesuffix(REPLACED)
        if number.isdecimal() and (path / manifest.NAME).is_file():
            found.append((int(number), not path.name.endswith(REPLACED), path))
    return [path for *_, path in sorted(found)]
