"""Slurm's launcher."""

import itertools
import re
from collections.abc import Iterator, Mapping

from hvdtrain.config.errors import LaunchError, LoneRanksError
from hvdtrain.runtime.launchers.environment import (
    DRAW_SECRET,
    SECRET_VARIABLE,
    Controller,
    Environment,
    has_secret,
    number,
    place,
)


class Srun:
    """Slurm's ``srun``: with one of its MPI plugins or, where the job has a secret, over Gloo."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`.

        A plain ``python`` in an sbatch or salloc script has SLURM_PROCID too, but no step of its own.
        """
        if not in_step(environ):
            return None
        size = number(environ, "SLURM_STEP_NUM_TASKS")
        controller = _controller(environ, size)
        local_rank, nodes = number(environ, "SLURM_LOCALID"), _tasks_per_node(environ, size)
        node = number(environ, "SLURM_NODEID") if len(nodes) > 1 else 0
        if node >= len(nodes):
            raise LaunchError(f"SLURM_NODEID must be below {len(nodes)}, the step's nodes. Received: {node}.")
        rank = number(environ, "SLURM_PROCID")
        if controller == "gloo" and rank == 0 and node != 0:
            raise LaunchError(
                "Rank 0 must run on the first node of the step, where the others look for it. Received: "
                f"SLURM_NODEID={node}. Unset SLURM_DISTRIBUTION and SLURM_HOSTFILE, or use MPI: srun --mpi=pmix …"
            )
        return place(
            launcher="srun",
            controller=controller,
            world=(rank, size),
            local=(local_rank, nodes[node]),
            cross=(sum(n > local_rank for n in nodes[:node]), sum(n > local_rank for n in nodes)),
            job_id=_job_id(environ),
            hostname=environ.get("SLURMD_NODENAME"),
            hosts=_hosts(environ, len(nodes)) if controller == "gloo" else (),
        )


def in_step(environ: Mapping[str, str]) -> bool:
    """Tell whether srun started this process as a task of a step.

    Slurm counts its own steps (batch script, salloc's shell, …) down from 2**32: those are scripts.
    """
    if not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environ.keys():
        return False
    return number(environ, "SLURM_STEP_ID") < 0xFFFF_FF00


def _controller(environ: Mapping[str, str], size: int) -> Controller:
    if {"PMIX_RANK", "PMI_RANK"} & environ.keys():
        return "mpi"
    if size == 1:
        return "none"
    if has_secret(environ):
        return "gloo"
    raise LoneRanksError(
        f"srun started {size} tasks without MPI, so that they cannot find one another. Use MPI: srun --mpi=pmix … "
        "(srun --mpi=list shows what this cluster has). Or use Gloo, with a secret in the job script, before srun: "
        f"export {SECRET_VARIABLE}={DRAW_SECRET}. "
        "If srun did not start this process, unset SLURM_STEP_ID, which it has inherited.",
        rank=number(environ, "SLURM_PROCID"),
    )


def _job_id(environ: Mapping[str, str]) -> str:
    """Return the job's and the step's number; a job that was requeued keeps both, and counts its starts."""
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    step = f"{environ.get('SLURM_JOB_ID', 'srun')}.{environ['SLURM_STEP_ID']}"
    return step if restarts == "0" else f"{step}.{restarts}"


def _hosts(environ: Mapping[str, str], count: int) -> tuple[str, ...]:
    name = "SLURM_STEP_NODELIST"
    hosts = tuple(expand_hosts(environ.get(name, "")))
    if len(hosts) != count:
        raise LaunchError(f"{name} must name the {count} nodes of the step. Received: {environ.get(name, '')!r}.")
    return hosts


def expand_hosts(text: str) -> Iterator[str]:
    """Return the hosts of one of Slurm's lists, as `scontrol show hostnames` does: "n[1-2,07],gpu" has four."""
    for pattern in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        pieces = re.split(r"\[([^\]]*)\]", pattern)  # names and, between them, ranges
        choices = [list(_numbers(piece)) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        yield from ("".join(choice) for choice in itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        if not (first + last).isdecimal():
            raise LaunchError(f"Slurm's list of hosts must hold numbers between brackets. Received: [{ranges}].")
        yield from (str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1))


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
