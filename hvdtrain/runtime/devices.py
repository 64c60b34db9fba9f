"""Cores, threads and GPUs of this process, by how the machine's processors share cores and memory."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.channel import ControlChannel, gather
from hvdtrain.runtime.diagnosis.machine import cpu_quota
from hvdtrain.runtime.launchers import Environment

SYSFS = Path("/sys/devices/system")


@dataclass(frozen=True, order=True)
class Place:
    """Where a processor (a hardware thread) lies; the numbers order it among others."""

    node: int
    """NUMA node: the memory that it reaches fastest."""
    socket: int
    core: int
    """The first hardware thread of its core."""


Topology = Mapping[int, Place]
"""The place of each processor, by its number."""


def read_topology(processors: Collection[int], root: Path = SYSFS) -> Topology:
    """Return the places of these processors; one that the system does not describe counts as a core of its own."""
    nodes = _nodes(root / "node")
    return {each: _place(each, nodes.get(each, 0), root / "cpu" / f"cpu{each}" / "topology") for each in processors}


def divide(processors: Collection[int], ranks: int, topology: Topology) -> list[tuple[int, ...]]:
    """Return the processors of each rank, equally many cores for each; none where there are too few for all.

    A rank gets whole cores, with all of their hardware threads, as long as there is one for each rank, and cores of
    one NUMA node as long as the nodes have room for all ranks.

    Args:
        processors: those that the ranks share.
        ranks: how many ranks there are.
        topology: the places of the processors.
    """
    cores = [
        tuple(sorted(threads))
        for _, threads in groupby(sorted(processors, key=lambda each: (topology[each], each)), topology.__getitem__)
    ]
    if len(cores) < ranks:
        cores = [(thread,) for core in cores for thread in core]
    share = len(cores) // ranks
    if share == 0:
        return [()] * ranks
    blocks = _within_nodes(cores, ranks, share, topology) or _blocks(cores, share)[:ranks]
    return [tuple(sorted(thread for core in block for thread in core)) for block in blocks]


def count_cores(processors: Collection[int], root: Path = SYSFS) -> int:
    """Return the number of cores that these processors belong to."""
    return len(set(read_topology(processors, root).values()))


Core = tuple[int, ...]


def _within_nodes(cores: Sequence[Core], ranks: int, share: int, topology: Topology) -> list[list[Core]]:
    """Return blocks of `share` cores of one node each, as evenly over the nodes as they allow; none if they don't."""
    nodes = [list(group) for _, group in groupby(cores, lambda core: topology[core[0]].node)]
    room = [len(node) // share for node in nodes]
    if sum(room) < ranks:
        return []
    taken = [0] * len(nodes)
    for _ in range(ranks):
        with_room = [at for at in range(len(nodes)) if taken[at] < room[at]]
        taken[max(with_room, key=lambda at: len(nodes[at]) - taken[at] * share)] += 1
    return [block for node, number in zip(nodes, taken, strict=True) for block in _blocks(node, share)[:number]]


def _blocks(cores: Sequence[Core], share: int) -> list[list[Core]]:
    return [list(cores[begin : begin + share]) for begin in range(0, len(cores) - share + 1, share)]


def _nodes(folder: Path) -> dict[int, int]:
    """Return the NUMA node of each processor."""
    found = {}
    for path in folder.glob("node[0-9]*/cpulist"):
        for processor in expand(_text(path)):
            found[processor] = int(path.parent.name.removeprefix("node"))
    return found


def _place(processor: int, node: int, folder: Path) -> Place:
    socket = _text(folder / "physical_package_id").strip()
    siblings = expand(_text(folder / "thread_siblings_list"))
    return Place(node, int(socket) if socket.isdigit() else 0, min(siblings, default=processor))


def expand(text: str) -> list[int]:
    """Return the numbers of Linux's ``0-3,8,10-11``."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [number for first, last in ranges for number in range(int(first), int(last or first) + 1)]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


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
    facts = gather(control, fact, timeout=timeout)
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
