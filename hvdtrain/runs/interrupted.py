"""What an interrupted run tells its user: where it stopped, and the command that goes on."""

import shlex

from hvdtrain.checkpoint.naming import complete, step_of
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runtime.launchers import Environment


def interrupted(folder: RunFolder, step: int, total_steps: int, environment: Environment) -> str:
    """Return the message.

    Args:
        folder: of the run.
        step: finished optimizer steps.
        total_steps: at which the run is to end.
        environment: who started this process, and how many others.
    """
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
