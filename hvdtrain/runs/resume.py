"""Resuming a run: what must have stayed the same, and the message of an interrupted one."""

import shlex
from pathlib import Path
from typing import Literal

from hvdtrain.backends.protocol import Backend
from hvdtrain.checkpoint.agreement import on_primary
from hvdtrain.checkpoint.naming import complete, step_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.files import apply_values, read_values
from hvdtrain.config.run import Config
from hvdtrain.data.file_order import FileOrder
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.observability.wording import plural
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.logs import PROGRESS
from hvdtrain.state.scalars import Scalars


def interrupted(folder: RunFolder, step: int, total_steps: int, environment: Environment) -> str:
    """Return the message of a run that was interrupted at `step`: how to resume it."""
    saved = [step_of(path) for path in complete(folder.checkpoints)] if folder.checkpoints.is_dir() else []
    where = f"interrupted at step {step} of {total_steps}"
    if not saved:
        return f"{where}, before its first checkpoint: start the run again (--checkpoint-every saves more often)."
    if saved[-1] >= total_steps:
        return f"{where}: training is complete, only its results in {folder.path} may not be."
    command = f"{launch_command(environment)}python -m hvdtrain --resume {shlex.quote(str(folder.path))}"
    return f"{where}. Resume from step {saved[-1]} with:\n  {command}"


def launch_command(environment: Environment) -> str:
    """Return what stood before `python` to start as many processes, with a space behind; "" for a single one."""
    if environment.elastic and environment.controller == "mpi":
        return f"mpirun --enable-recovery -np {environment.size} "
    if environment.elastic:
        return f"horovodrun --gloo -np {environment.size} --host-discovery-script SCRIPT "
    commands = {
        "horovodrun": "horovodrun --gloo -np" if environment.controller == "gloo" else "horovodrun -np",
        "mpirun": "mpirun -np",
        "mpirun_rsh": "mpirun_rsh -np",
        "jsrun": "jsrun -n",
        "mpiexec": "mpiexec -n",
        "srun": "srun -n",
    }
    command = commands.get(environment.launcher)
    return f"{command} {environment.size} " if command else ""


Resume = Literal["no", "yes", "auto"]
"""Whether a run goes on from its newest good checkpoint; `auto` starts it anew where there is none, good or damaged."""


def is_finished(folder: RunFolder, config: Config, backend: Backend) -> bool:
    """Return whether the run in `folder` has trained as long as `config` asks, and log it. Collective."""

    def look() -> str | None:
        if not folder.summary.is_file() or not folder.config.is_file():
            return None
        before = apply_values(Config(config.recipe), read_values(folder.config), str(folder.config)).training
        asked = (config.training.epochs, config.training.max_steps)
        return str(folder.path) if asked == (before.epochs, before.max_steps) else None

    finished = on_primary(backend, look)
    if finished is not None and backend.primary:
        PROGRESS.info(f"--resume auto: the run in {finished} is finished: there is nothing left to train.")
    return finished is not None


def settle_processes(scalars: Scalars, data: TrainingData, processes: int, run: Path) -> None:
    """Refuse to resume within an epoch on another number of processes if their shares of the files depend on it.

    The number is noted in `scalars`.

    Raises:
        ConfigError: naming the number that can go on.
    """
    if not isinstance(getattr(data, "order", None), FileOrder):
        return
    before, within = scalars.processes, scalars.step_in_epoch
    if before not in (None, processes) and within:
        end = scalars.step - within + data.steps_per_epoch
        raise ConfigError(
            f"--resume {run}: with --shard-by files an epoch is finished by as many ranks as began it, or samples "
            f"would be lost and repeated. Received: {plural(processes, 'rank')} within an epoch of "
            f"{plural(before, 'rank')}, which ends at step {end}: go on with {before} until then (--max-steps {end})."
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
