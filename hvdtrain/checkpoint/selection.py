"""Which checkpoint of a folder is meant: the newest, the best, or that of a step."""

from pathlib import Path

from hvdtrain.checkpoint.manifest import scalars_of
from hvdtrain.checkpoint.naming import complete, step_of
from hvdtrain.config.errors import CheckpointError


def find_checkpoint(folder: Path, which: str = "newest") -> Path:
    """Return a complete checkpoint in `folder`.

    Args:
        folder: the folder of checkpoints.
        which: `newest`; `best`, by the metric that its training kept the best of; or the number of a step.

    Raises:
        CheckpointError: it is not there, or `which` is none of these; what is there is named.
    """
    found = complete(folder)
    if not found:
        raise CheckpointError(f"There is no complete checkpoint in {folder}.")
    if which == "newest":
        return found[-1]
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
    """Return the step of the best checkpoint, which the newest one records."""
    best = scalars_of(found[-1]).get("best")
    if best is None:
        raise CheckpointError(
            f"The training of {found[-1].parent} recorded no best checkpoint: --keep-best METRIC, or "
            f"hvdtrain.Checkpoint(…, best=METRIC), does. {_contents(found)}"
        )
    return int(best["step"])


def _contents(found: list[Path]) -> str:
    return f"It holds the steps {', '.join(str(step) for step in dict.fromkeys(map(step_of, found)))}."
