"""Divide cores and GPUs among the ranks of a machine, by how its processors share cores and memory."""

import ctypes
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from hvdtrain.config.errors import LaunchError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.channel import ControlChannel, gather, name_ranks
from hvdtrain.runtime.diagnosis.machine import cpu_quota, text_of
from hvdtrain.runtime.launchers import Environment


@dataclass(frozen=True)
class RankGpus:
    """The GPUs that a rank sees."""

    host: str
    visible: tuple[str, ...]
    """Names of the GPUs that TensorFlow lists, in its order: the same for a GPU in every process."""
    taken: str | None = None
    """The one that it works with already: chosen by the script, or in an earlier world of an elastic job."""


def agree_on_gpu(
    control: ControlChannel, environment: Environment, mine: RankGpus, *, mixed: bool = False, timeout: float
) -> int | None:
    """Return the index of the GPU that this rank takes of those it sees; None where it sees none.

    Args:
        environment: this rank's place.
        mine: what `visible_gpus` returns.
        mixed: whether some ranks may work without a GPU beside others with one.

    Raises:
        LaunchError: a host has fewer GPUs than ranks, or some ranks see GPUs and others none; the same on every rank.
    """
    facts = gather(control, asdict(mine), timeout=timeout)
    ranks = [RankGpus(fact["host"], tuple(fact["visible"]), fact["taken"]) for fact in facts]
    chosen = choose_gpus(ranks, mixed=mixed)[environment.rank]
    return None if chosen is None else mine.visible.index(chosen)


def choose_gpus(ranks: Sequence[RankGpus], *, mixed: bool = False) -> list[str | None]:
    """Return the GPU of each rank, in rank order; None for those that see none.

    A scheduler may show each rank its own GPU, under whatever number, or all ranks of a host all of its GPUs.

    Raises:
        LaunchError: a host has fewer GPUs than ranks, or some ranks see GPUs and others none (unless `mixed`).
    """
    blind = [rank for rank, its in enumerate(ranks) if not its.visible]
    if blind and len(blind) < len(ranks) and not mixed:
        hosts = ", ".join(sorted({ranks[rank].host for rank in blind}))
        raise LaunchError(
            f"All ranks train on GPUs, or none does. Received: {name_ranks(blind)} on {hosts} without a GPU, the "
            "others with one. See what python -m hvdtrain doctor says there, or hide the GPUs from all ranks: "
            "CUDA_VISIBLE_DEVICES=-1."
        )
    chosen = {(its.host, its.taken): rank for rank, its in enumerate(ranks) if its.taken is not None}
    found = [its.taken for its in ranks]
    # Those that see fewer first: the others have a choice.
    without = [rank for rank, name in enumerate(found) if name is None and ranks[rank].visible]
    for rank in sorted(without, key=lambda rank: len(ranks[rank].visible)):
        its = ranks[rank]
        free = next((name for name in its.visible if (its.host, name) not in chosen), None)
        if free is None:
            here = [each for each in ranks if each.host == its.host and each.visible]
            gpus = len({name for each in here for name in each.visible})
            raise LaunchError(
                f"Each rank takes a GPU of its own. Received: {len(here)} ranks on {its.host}, which see {gpus} of its "
                f"GPUs. Start at most {gpus} there, have the scheduler show each its own, or hide the GPUs to train on "
                "CPUs: CUDA_VISIBLE_DEVICES=-1."
            )
        chosen[its.host, free] = rank
        found[rank] = free
    return found


def visible_gpus(host: str) -> RankGpus:
    """Return the GPUs that TensorFlow shows this process on `host`."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return RankGpus(host, ())
    names = driver_names()
    if len(names) != len(gpus):  # by the numbers of CUDA_VISIBLE_DEVICES, where the driver does not tell
        numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = tuple(f"{numbers}#{index}" for index in range(len(gpus)))
    shown = tf.config.get_visible_devices("GPU")
    return RankGpus(host, names, names[gpus.index(shown[0])] if len(shown) == 1 < len(gpus) else None)


def driver_names(library: str = "libcuda.so.1") -> tuple[str, ...]:
    """Return the driver's names (UUIDs) of the GPUs that this process sees, in TensorFlow's order; () if it has none.

    Slurm may show each task its own GPU as number 0: numbers do not tell them apart.
    """
    try:
        cuda: Any = ctypes.CDLL(library)
        count = ctypes.c_int()
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return ()
        names = []
        for index in range(count.value):
            device, name = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            if cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetUuid(ctypes.byref(name), device):
                return ()
            names.append(bytes(name).hex())
        return tuple(names)
    except (OSError, AttributeError):
        return ()


SYSFS = Path("/sys/devices/system")


@dataclass(frozen=True, order=True)
class Place:
    """Location of a processor (a hardware thread); the numbers order it among others."""

    node: int
    """NUMA node: the memory that it reaches fastest."""
    socket: int
    core: int
    """The first hardware thread of its core."""


Topology = Mapping[int, Place]
"""The place of each processor, by its number."""


def read_topology(processors: Collection[int], root: Path = SYSFS) -> Topology:
    """Return the places of these processors; one that the system does not describe counts as a core of its own."""
    nodes: dict[int, int] = {}
    for path in (root / "node").glob("node[0-9]*/cpulist"):
        nodes |= dict.fromkeys(expand(text_of(path)), int(path.parent.name.removeprefix("node")))
    places = {}
    for each in processors:
        folder = root / "cpu" / f"cpu{each}" / "topology"
        socket = text_of(folder / "physical_package_id").strip()
        first = min(expand(text_of(folder / "thread_siblings_list")), default=each)
        places[each] = Place(nodes.get(each, 0), int(socket) if socket.isdigit() else 0, first)
    return places


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


def expand(text: str) -> list[int]:
    """Return the numbers of Linux's ``0-3,8,10-11``."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [number for first, last in ranges for number in range(int(first), int(last or first) + 1)]


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
    of a socket, divide it as `divide` does; with more ranks than processors nothing is pinned.

    Args:
        masks: the processors each rank of this machine may use, in the order of local ranks.
        local_rank: this rank's place in `masks`.
        threads: threads per rank that the user asked for; None divides the cores.
        pin: whether a rank may be given cores of its own.
        topology: which processors share a core and a NUMA node; None: each is a core, of one node.
        quota: CPU quota in cores of the ranks of this machine together; None if unlimited.
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
