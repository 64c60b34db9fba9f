"""Hosts and their slots, as users and schedulers write them down."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.errors import ConfigError

_HOST = re.compile(
    r"(?P<name>[A-Za-z0-9_.-]+)(?:(?:\s*:\s*|\s+slots\s*=\s*)(?P<slots>\d+))?(?:\s+max[-_]slots\s*=\s*\d+)?"
)


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it takes."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of ``h1:2,h2:2``; a host without a number takes one rank.

    Raises:
        ConfigError: it is written in another way.
    """
    return _merge(_host(word.strip(), f"--hosts={text}") for word in text.split(","))


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file with a line for each: ``h1 slots=2`` or ``h1:2``, or ``h1`` once for each slot.

    Raises:
        ConfigError: it cannot be read, names no host, or a line is written in another way.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The file of hosts cannot be read. Received: {path} ({error}).") from error
    hosts = _merge(_host(line, str(path)) for line in lines if line)
    if not hosts:
        raise ConfigError(f"The file of hosts names no host. Received: {path}.")
    return hosts


def take(hosts: Sequence[Host], ranks: int) -> tuple[Host, ...]:
    """Return the first of these hosts, with as many slots as there are ranks."""
    taken: list[Host] = []
    for host in hosts:
        slots = min(host.slots, ranks - sum(each.slots for each in taken))
        if slots > 0:
            taken.append(Host(host.name, slots))
    return tuple(taken)


def _host(text: str, where: str) -> Host:
    match = _HOST.fullmatch(text)
    if match is None or (match["slots"] is not None and int(match["slots"]) < 1):
        raise ConfigError(
            f"Hosts are written NAME:RANKS, with at least one rank each, as in --hosts h1:2,h2:2. Received: {text!r} "
            f"in {where}."
        )
    return Host(match["name"], int(match["slots"] or 1))


def _merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Add up the slots of a host that is named several times, as in the files of PBS and LSF."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, number) for name, number in slots.items())
