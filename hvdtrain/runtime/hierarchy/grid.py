"""The ranks of a group by host, and those that exchange between the hosts."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostGrid:
    """The ranks of a group by host."""

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host, ascending."""

    @property
    def bridges(self) -> int:
        """How many ranks of each host exchange with other hosts: its first ones."""
        return min(map(len, self.hosts))

    @property
    def crossings(self) -> list[tuple[int, ...]]:
        """The groups that exchange between hosts: one bridge of each."""
        return [tuple(host[place] for host in self.hosts) for place in range(self.bridges)]

    def host_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of this one's host."""
        return next(host for host in self.hosts if rank in host)

    def crossing_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the ranks that this one exchanges with on other hosts, itself included; None if it is no bridge."""
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
