"""Select checkpoints in a folder: the newest good one, the best, that of a step, and those to keep."""

import contextlib
import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import index
from hvdtrain.checkpoint.commit import discard
from hvdtrain.checkpoint.index import read_index
from hvdtrain.checkpoint.naming import PREFIX, checkpoints_at, complete, numbered, step_of
from hvdtrain.checkpoint.tensor_files import SliceReader
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.logs import LOGGER

_HOUR_S = 3600.0

DAMAGED = ".damaged"
"""Suffix of a damaged checkpoint that was set aside; a number follows if there are several of one step."""


def find_checkpoint(folder: Path, which: str = "newest") -> Path:
    """Return a verified checkpoint in `folder`.

    Args:
        folder: the folder of checkpoints.
        which: `newest`, passing over damaged ones; `best`, by the metric its training kept the best of; or the number
            of a step.

    Raises:
        CheckpointError: it is damaged or missing, or `which` is none of these; the steps in the folder are named.
    """
    if which == "newest":
        found = newest_good(folder)
        if found is None:
            raise CheckpointError(f"There is no complete checkpoint in {folder}.")
        return found
    path = _chosen(folder, which)
    SliceReader(path).verify()
    return path


def located(folder: Path, which: str) -> Path:
    """Return the checkpoint `which` of a run or a folder of checkpoints, or `folder` if it is one.

    Raises:
        CheckpointError: it is not there.
    """
    if (folder / index.NAME).is_file():
        if which != "newest":
            raise CheckpointError(f"{folder} is a single checkpoint: leave out which. Received: {which!r}.")
        read_index(folder)  # restoring compares every tensor with its checksum
        return folder
    return find_checkpoint(checkpoints_at(folder), which)


def newest_good(folder: Path, *, set_aside: bool = False) -> Path | None:
    """Return the newest undamaged checkpoint in `folder`, or None; warn of damaged ones.

    Args:
        folder: the folder of checkpoints.
        set_aside: rename the damaged ones, out of the way of new ones.

    Raises:
        CheckpointError: with `set_aside`, if all are damaged. They stay, so that the next attempt fails as well.
    """
    damaged: dict[Path, CheckpointError] = {}
    good = None
    for path in reversed(numbered(folder)):
        try:
            SliceReader(path).verify()
        except CheckpointError as error:
            damaged[path] = error
        else:
            good = path
            break
    for path, reason in damaged.items():
        LOGGER.warning(f"{reason} It is {_set_aside(path) if set_aside and good else 'passed over'}.")
    if set_aside and damaged and good is None:
        raise CheckpointError(
            f"No checkpoint in {folder} is good: damaged are {', '.join(path.name for path in damaged)}. Put back a "
            "sound copy, if there is one; or, to start anew, name another folder, or remove this one: "
            f"rm -r {shlex.quote(str(folder))}"
        )
    return good


def _set_aside(path: Path) -> str:
    names = (f"{path.name}{DAMAGED}{number}" for number in ("", *range(2, 1000)))
    aside = next(place for place in map(path.with_name, names) if not place.exists())
    try:
        os.rename(path, aside)
    except OSError as error:
        return f"passed over; it cannot be set aside: {error.strerror}"
    return f"set aside as {aside.name}"


def damaged_ones(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder` that were set aside."""
    return sorted(folder.glob(f"{PREFIX}*{DAMAGED}*"))


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
    """Return the step of the best checkpoint, which the newest readable one records."""
    best = next(filter(None, map(_scalars, reversed(found))), {}).get("best")
    if best is None:
        raise CheckpointError(
            f"The training of {found[-1].parent} recorded no best checkpoint: --keep-best METRIC, or "
            f"hvdtrain.Checkpoint(…, best=METRIC), does. {_contents(found)}"
        )
    return int(best["step"])


def _scalars(path: Path) -> dict[str, Any]:
    try:
        return dict(read_index(path).scalars)
    except CheckpointError:
        return {}


def _contents(found: list[Path]) -> str:
    return f"It holds the steps {', '.join(str(step) for step in dict.fromkeys(map(step_of, found)))}."


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep besides the best."""

    keep: int | None = 3
    """Number of the newest to keep; None keeps all."""
    every_hours: float | None = None
    """Also keep the first checkpoint, and each that is at least this many hours younger than the last one so kept."""

    def superfluous(self, checkpoints: Sequence[Path]) -> list[Path]:
        """Return the `checkpoints`, given with the newest last, that neither rule keeps."""
        if self.keep is None:
            return []
        hourly = self._hourly(checkpoints)
        return [path for path in checkpoints[: -self.keep] if path not in hourly]

    def _hourly(self, checkpoints: Sequence[Path]) -> list[Path]:
        if self.every_hours is None:
            return []
        kept: list[Path] = []
        last = float("-inf")
        for path in checkpoints:
            try:
                saved = read_index(path).saved_at
            except CheckpointError:
                continue
            if saved - last >= self.every_hours * _HOUR_S:
                kept.append(path)
                last = saved
        return kept


def remove_old(folder: Path, spared: Collection[Path], retention: Retention) -> None:
    """Remove the checkpoints that `retention` does not keep, except `spared` ones."""
    for path in retention.superfluous(complete(folder)):
        if path not in spared:
            with contextlib.suppress(OSError):
                discard(path)
