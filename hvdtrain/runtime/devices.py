"""Which cores, threads and GPU a rank works with; decided and applied before TensorFlow's context exists."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.diagnosis.machine import cpu_quota
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.topology import Place, Topology, divide, read_topology


@dataclass(frozen=True)
class DevicePlan:
    """The part of its machine that a rank uses."""

    cores: tuple[int, ...]
    """Processors this process may run on."""
    threads: int
    """Threads within one operation."""
    pinned: bool
    """Whether `cores` was chosen for this rank alone."""


def plan_devices(
    masks: Sequence[Sequence[int]],
    local_rank: int,
    *,
    threads: int | None = None,
    pin: bool = True,
    topology: Topology | None = None,
    quota: float | None = None,
) -> DevicePlan:
    """Divide the cores of one machine among its ranks.

    A launcher that already gave each rank cores of its own is followed. Ranks that share a set, all of them or those
    of a socket, divide it as `runtime.topology.divide` does; with more ranks than processors nothing is pinned.

    Args:
        masks: the processors each rank of this machine may use, in the order of local ranks.
        local_rank: this rank's place in `masks`.
        threads: threads per rank that the user asked for; None divides the cores.
        pin: whether a rank may be given cores of its own.
        topology: which processors share a core and a NUMA node; None: each is a core, of one node.
        quota: cores' worth of time that the ranks of this machine may use together; None for no limit.
    """
    mine = tuple(sorted(masks[local_rank]))
    sharing = [rank for rank, mask in enumerate(masks) if set(mask) == set(mine)]
    most = len(mine) if quota is None else max(1, int(quota / len(masks)))
    if len(sharing) == 1:
        return DevicePlan(mine, threads or min(len(mine), most), pinned=len(masks) > 1)
    places = topology if topology is not None else {each: Place(0, 0, each) for each in mine}
    block = divide(mine, len(sharing), places)[sharing.index(local_rank)]
    wanted = threads or max(1, min(len(block), most))
    return DevicePlan(block, wanted, pinned=True) if block and pin else DevicePlan(mine, wanted, pinned=False)


def gather_masks(control: ControlChannel, environment: Environment, *, timeout: float) -> list[list[int]]:
    """Return the usable cores of every rank on this machine, in the order of local ranks."""
    fact = {
        "host": environment.hostname,
        "local_rank": environment.local_rank,
        "cores": sorted(os.sched_getaffinity(0)),
    }
    facts = [json.loads(text) for text in control.exchange(json.dumps(fact).encode(), timeout=timeout)]
    here = [other for other in facts if other["host"] == environment.hostname]
    return [other["cores"] for other in sorted(here, key=lambda other: int(other["local_rank"]))]


def place_process(
    control: ControlChannel, environment: Environment, config: RuntimeConfig, *, timeout: float
) -> DevicePlan:
    """Plan this rank's cores and bind the process to them; call it before TensorFlow starts its threads."""
    masks = gather_masks(control, environment, timeout=timeout)
    here = masks[environment.local_rank]
    plan = plan_devices(
        masks,
        environment.local_rank,
        threads=config.threads,
        pin=config.pin,
        topology=read_topology(here),
        quota=cpu_quota(),
    )
    if plan.pinned:
        os.sched_setaffinity(0, plan.cores)
    return plan


def choose_deterministic_operations() -> None:
    """Have TensorFlow use kernels that give the same bits every time, and refuse operations that have none."""
    import tensorflow as tf

    tf.config.experimental.enable_op_determinism()
    # It then refuses random operations as long as no seed is set. That of a script or run replaces this one.
    tf.random.set_seed(0)


def configure_tensorflow(plan: DevicePlan, gpu: int | None, *, all_gpus: bool = False) -> None:
    """Apply `plan` to TensorFlow's thread pools and show it one GPU, of that index, or all of them."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(plan.threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, plan.threads))
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        mine = gpus if all_gpus or gpu is None else [gpus[gpu]]
        tf.config.set_visible_devices(mine, "GPU")
        for gpu in mine:
            tf.config.experimental.set_memory_growth(gpu, True)
