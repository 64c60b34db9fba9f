"""How the processors of a machine share cores and memory, and which of them each rank works with."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

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
