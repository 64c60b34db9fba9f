"""Which GPU each rank takes: one for each, agreed by all ranks, before TensorFlow's context exists."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.channel import ControlChannel, gather, name_ranks
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
        control: the channel between the ranks; every rank must call this.
        environment: this rank's place.
        mine: what `visible_gpus` returns.
        mixed: whether some ranks may work without a GPU beside others with one.
        timeout: seconds to wait for the other ranks.

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
            raise _too_few(ranks, its.host)
        chosen[its.host, free] = rank
        found[rank] = free
    return found


def _too_few(ranks: Sequence[RankGpus], host: str) -> LaunchError:
    here = [its for its in ranks if its.host == host and its.visible]
    gpus = len({name for its in here for name in its.visible})
    return LaunchError(
        f"Each rank takes a GPU of its own. Received: {len(here)} ranks on {host}, which see {gpus} of its GPUs. "
        f"Start at most {gpus} there, have the scheduler show each its own, or hide the GPUs to train on CPUs: "
        "CUDA_VISIBLE_DEVICES=-1."
    )


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
        return tuple(_name(cuda, index) for index in range(count.value))
    except (OSError, AttributeError):
        return ()


def _name(cuda: Any, index: int) -> str:
    device, name = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetUuid(ctypes.byref(name), device):
        raise OSError(f"CUDA does not name GPU {index}.")
    return bytes(name).hex()
