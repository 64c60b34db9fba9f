"""Which checkpoint of a folder is meant: the newest good one, the best, or that of a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import manifest
from hvdtrain.checkpoint.integrity import verify
from hvdtrain.checkpoint.manifest import scalars_of
from hvdtrain.checkpoint.naming import checkpoints_at, numbered, set_aside, step_of
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.logs import LOGGER

OnDamaged = Callable[[Path, CheckpointError], object]
"""Called with a damaged checkpoint and what is wrong with it, before an older one is looked at."""


def pass_over(path: Path, error: CheckpointError) -> None:
    """Warn of a damaged checkpoint, which stays where it is."""
    _warn(f"{error} It is passed over.")


def put_aside(path: Path, error: CheckpointError) -> None:
    """Warn of a damaged checkpoint and set it aside, so that what is saved from now on does not meet it."""
    try:
        _warn(f"{error} It is set aside as {set_aside(path).name}.")
    except OSError as cause:
        _warn(f"{error} It is passed over; it cannot be set aside: {cause.strerror}.")


def find_checkpoint(folder: Path, which: str = "newest", on_damaged: OnDamaged = pass_over) -> Path:
    """Return a checkpoint in `folder` whose every byte is as it was written.

    Args:
        folder: the folder of checkpoints.
        which: `newest`, where damaged ones do not count; `best`, by the metric that its training kept the best of; or
            the number of a step.
        on_damaged: called with each of those that do not count.

    Raises:
        CheckpointError: it is damaged or not there, or `which` is none of these; what is there is named.
    """
    if which == "newest":
        found = newest_good(folder, on_damaged)
        if found is None:
            raise CheckpointError(f"There is no complete checkpoint in {folder}.")
        return found
    path = _chosen(folder, which)
    verify(path)
    return path


def located(folder: Path, which: str) -> Path:
    """Return the checkpoint that is meant by `folder` and `which`; see `hvdtrain.Trainer.restore`.

    Raises:
        CheckpointError: it is not there.
    """
    if (folder / manifest.NAME).is_file():
        if which != "newest":
            raise CheckpointError(f"{folder} is a single checkpoint: leave out which. Received: {which!r}.")
        scalars_of(folder)  # restoring compares every tensor with its checksum
        return folder
    return find_checkpoint(checkpoints_at(folder), which)


def newest_good(folder: Path, on_damaged: OnDamaged = pass_over) -> Path | None:
    """Return the newest checkpoint in `folder` that is not damaged; None if there is none."""
    for path in reversed(numbered(folder)):
        try:
            verify(path)
        except CheckpointError as error:
            on_damaged(path, error)
        else:
            return path
    return None


def _chosen(folder: Path, which: str) -> Path:
    found = numbered(folder)
    if not found:
        raise CheckpointError(f"There is no complete checkpoint in {folder}.")
    step = _best_step(found) if which == "best" else _number(which)
    matching = [path for path in found if step_of(path) == step]
    if not matching:
        raise CheckpointError(f"The checkpoint of step {step} is not in {folder}. {_contents(found)}")
    return matching[-1]


def _number(which: str) -> int:
    if not which.isdecimal():
        raise CheckpointError(f"A checkpoint is best, newest, or the number of a step. Received: {which!r}.")
    return int(which)


def _best_step(found: list[Path]) -> int:
    """Return the step of the best checkpoint, which the newest one that can be read records."""
    best = next(filter(None, map(_scalars, reversed(found))), {}).get("best")
    if best is None:
        raise CheckpointError(
            f"The training of {found[-1].parent} recorded no best checkpoint: --keep-best METRIC, or "
            f"hvdtrain.Checkpoint(…, best=METRIC), does. {_contents(found)}"
        )
    return int(best["step"])


def _scalars(path: Path) -> dict[str, Any]:
    try:
        return scalars_of(path)
    except CheckpointError:
        return {}


def _contents(found: list[Path]) -> str:
    return f"It holds the steps {', '.join(str(step) for step in dict.fromkeys(map(step_of, found)))}."


def _warn(text: str) -> None:
    LOGGER.warning(text)
