"""Sums in two levels: inside each host first, then between the hosts.

A ring over all ranks sends 2 (n - 1) / n of a tensor out of each host, n being the number of ranks. Here the ranks of a
host add up one slice each, exchange it with the ranks that hold the same slice on the other hosts, and gather the whole
again: with h hosts, 2 (h - 1) / h of the tensor leaves a host, whatever the number of its ranks. Between 2 hosts with 2
ranks each that is two thirds.

Hosts may have different numbers of ranks. Each has as many bridges, ranks that hold a slice, as the smallest has ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdtrain.config.errors import LaunchError

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class HostGrid:
    """The ranks of a group by host."""

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host, ascending."""

    @property
    def bridges(self) -> int:
        """Number of ranks of each host that exchange with other hosts: its first ones."""
        return min(map(len, self.hosts))

    @property
    def crossings(self) -> list[tuple[int, ...]]:
        """The groups that exchange between hosts: one bridge of each."""
        return [tuple(host[place] for host in self.hosts) for place in range(self.bridges)]

    def host_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of this one's host."""
        return next(host for host in self.hosts if rank in host)

    def crossing_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the ranks that this one exchanges with on other hosts, itself included; None if it is not a bridge."""
        return next((crossing for crossing in self.crossings if rank in crossing), None)

    def process_sets(self) -> list[tuple[int, ...]]:
        """Return the groups that need a process set of their own; the same list on every rank."""
        return [group for group in (*self.hosts, *self.crossings) if len(group) > 1]


def host_grid(ranks: Sequence[int], hosts: Sequence[str]) -> HostGrid | None:
    """Return the grid of `ranks`; None where two levels are one: on a single host, or with one rank on each.

    Args:
        ranks: of one group, ascending.
        hosts: host name of each rank of the world.
    """
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    if len(by_host) < 2 or len(by_host) == len(ranks):
        return None
    return HostGrid(tuple(map(tuple, by_host.values())))


def sum_by_host(
    tensor: "tf.Tensor",
    local: Any,
    bridges: int,
    between: "Callable[[tf.Tensor], tf.Tensor] | None",
    *,
    name: str,
) -> "tf.Tensor":
    """Return the sum of `tensor` over all hosts, in its shape and dtype.

    Args:
        tensor: this rank's, of the same static shape on all of them.
        local: collectives (`AxisCollectives`) among the ranks of this host.
        bridges: how many of them hold a slice; see `HostGrid`.
        between: adds up this bridge's slice, a vector, over the hosts; None on a rank that is not a bridge.
        name: tells this sum from every other; `/scatter` and `/gather` are added.
    """
    import tensorflow as tf

    elements = tensor.shape.num_elements()
    if elements is None:
        raise LaunchError(f"A sum by host needs a static shape. Received: {tensor.shape} of {name}.")
    widths = [elements // bridges + (place < elements % bridges) for place in range(bridges)]
    rows = [*widths, *[0] * (local.size - bridges)]
    mine = local.scatter_rows(tf.reshape(tensor, [-1]), rows, name=f"{name}/scatter")
    if between is not None:
        slices = tf.reshape(mine, [local.size, rows[local.index]])  # from each rank of the host
        mine = between(tf.add_n(tf.unstack(slices)))
    return tf.reshape(local.all_gather(mine, name=f"{name}/gather"), tensor.shape)
