"""Slurm's launcher."""

import re
from collections.abc import Iterator, Mapping

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.launchers.environment import Environment, number, place


class Srun:
    """Slurm's ``srun``, with one of its MPI plugins."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`.

        A plain ``python`` in an sbatch or salloc script has SLURM_PROCID too, but no step of its own.
        """
        if not in_step(environ):
            return None
        size = number(environ, "SLURM_STEP_NUM_TASKS")
        plugin = bool({"PMIX_RANK", "PMI_RANK"} & environ.keys())
        if size > 1 and not plugin:
            raise LaunchError(
                f"srun started {size} tasks without MPI, so that they cannot find one another. Use: "
                "srun --mpi=pmix … (srun --mpi=list shows what this cluster has). If srun did not start this "
                "process, unset SLURM_STEP_ID, which it has inherited."
            )
        local_rank, nodes = number(environ, "SLURM_LOCALID"), _tasks_per_node(environ, size)
        node = number(environ, "SLURM_NODEID") if len(nodes) > 1 else 0
        if node >= len(nodes):
            raise LaunchError(f"SLURM_NODEID must be below {len(nodes)}, the step's nodes. Received: {node}.")
        return place(
            launcher="srun",
            controller="mpi" if plugin else "none",
            world=(number(environ, "SLURM_PROCID"), size),
            local=(local_rank, nodes[node]),
            cross=(sum(n > local_rank for n in nodes[:node]), sum(n > local_rank for n in nodes)),
            job_id=f"{environ.get('SLURM_JOB_ID', 'srun')}.{environ['SLURM_STEP_ID']}",
        )


def in_step(environ: Mapping[str, str]) -> bool:
    """Tell whether srun started this process as a task of a step.

    Slurm counts its own steps (batch script, salloc's shell, …) down from 2**32: those are scripts.
    """
    if not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environ.keys():
        return False
    return number(environ, "SLURM_STEP_ID") < 0xFFFF_FF00


def _tasks_per_node(environ: Mapping[str, str], size: int) -> list[int]:
    """Return the number of the step's tasks on each of its nodes, from Slurm's "2(x3),1"."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = environ.get(name, str(size))
    nodes = list(_expand(text))
    if sum(nodes) != size:
        raise LaunchError(f"{name} must add up to the {size} tasks of the step. Received: {text!r}.")
    return nodes


def _expand(text: str) -> Iterator[int]:
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match:
            yield from [int(match[1])] * int(match[2] or 1)
