"""Which cores, threads and GPU a rank works with; decided and applied before TensorFlow's context exists."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.launchers import Environment


@dataclass(frozen=True)
class DevicePlan:
    """The part of its machine that a rank uses."""

    cores: tuple[int, ...]
    """Cores this process may run on."""
    threads: int
    """Threads within one operation."""
    pinned: bool
    """Whether `cores` was chosen for this rank alone."""


def plan_devices(
    masks: Sequence[Sequence[int]], local_rank: int, *, threads: int | None = None, pin: bool = True
) -> DevicePlan:
    """Divide the cores of one machine among its ranks.

    Args:
        masks: the cores each rank of this machine may use, in the order of local ranks.
        local_rank: this rank's place in `masks`.
        threads: threads per rank that the user asked for; None divides the cores.
        pin: whether a rank may be given cores of its own.

    A launcher that already gave the ranks different cores is followed. Where they all share one
    set, each rank gets an equal block of it; with more ranks than cores nothing is pinned.
    """
    mine = tuple(sorted(masks[local_rank]))
    shared = all(set(mask) == set(mine) for mask in masks)
    if not shared or len(masks) == 1:
        return DevicePlan(mine, threads or len(mine), pinned=not shared)
    share = len(mine) // len(masks)
    if share == 0 or not pin:
        return DevicePlan(mine, threads or max(1, share), pinned=False)
    block = mine[local_rank * share : (local_rank + 1) * share]
    return DevicePlan(block, threads or share, pinned=True)


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
    plan = plan_devices(masks, environment.local_rank, threads=config.threads, pin=config.pin)
    if plan.pinned:
        os.sched_setaffinity(0, plan.cores)
    return plan


def configure_tensorflow(plan: DevicePlan, environment: Environment, *, all_gpus: bool = False) -> None:
    """Apply `plan` to TensorFlow's thread pools and show it one GPU, by local rank, or all of them."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(plan.threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, plan.threads))
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        mine = gpus if all_gpus else [gpus[environment.local_rank % len(gpus)]]
        tf.config.set_visible_devices(mine, "GPU")
        for gpu in mine:
            tf.config.experimental.set_memory_growth(gpu, True)
