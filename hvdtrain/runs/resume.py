"""Checks of a resumed run against the run that it continues."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.run import Config
from hvdtrain.data.file_order import FileOrder
from hvdtrain.data.identity import Identity, check_same_samples
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.observability.wording import plural
from hvdtrain.state.scalars import Scalars


def check_samples(before: Mapping[str, Any] | None, now: Identity, config: Config, earlier: Config, run: Path) -> None:
    """Refuse other samples than the run in the folder `run` was trained on.

    Args:
        before: what its checkpoint says of them; None where an earlier version wrote it.
        now: those that are there.
        config: where they are now.
        earlier: where they were.
        run: the folder.

    Raises:
        DataError: saying what differs.
        ConfigError: they were moved, and the checkpoint does not say what they were.
    """
    if before is not None:
        check_same_samples(before, now, run)
    elif config.data.data_args != earlier.data.data_args:
        raise ConfigError(
            f"--resume {run}: an earlier version wrote its checkpoint, which does not say what the run was trained "
            "on: its data must stay where they were. Leave out --data-args."
        )


def settle_processes(scalars: Scalars, data: TrainingData, processes: int, run: Path) -> None:
    """Refuse to resume within an epoch on another number of processes if their shares of the files depend on it.

    Args:
        scalars: of the run in the folder `run`; the number is noted there.
        data: its training samples.
        processes: how many read them.
        run: the folder.

    Raises:
        ConfigError: naming the number that can go on.
    """
    if not isinstance(getattr(data, "order", None), FileOrder):
        return
    before, within = scalars.processes, scalars.place(data.steps_per_epoch)
    if before not in (None, processes) and within:
        end = scalars.step - within + data.steps_per_epoch
        raise ConfigError(
            f"--resume {run}: with --shard-by=files an epoch is finished by as many ranks as began it, or samples "
            f"would be lost and repeated. Received: {plural(processes, 'rank')} within an epoch of "
            f"{plural(before, 'rank')}, which ends at step {end}: go on with {before} until then (--max-steps={end})."
        )
    scalars.processes = processes


def stretched_schedule(config: Config, earlier: Config) -> str | None:
    """Return a warning if the learning rate of a resumed run departs from its earlier schedule; else None."""
    epochs, before = config.training.epochs, earlier.training.epochs
    if config.optim.schedule == "constant" or epochs == before:
        return None
    return (
        f"warning: the {config.optim.schedule} schedule spans {plural(epochs, 'epoch')} now and spanned {before} "
        "before: the learning rate goes on where the longer or shorter course is at this step."
    )
