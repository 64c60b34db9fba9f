"""How far the clocks of the hosts are apart."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdtrain.runtime.control.channel import ControlChannel

ROUNDS = 8


@dataclass(frozen=True)
class Offset:
    """What is added to a rank's clock to get that of rank 0."""

    microseconds: float
    uncertainty: float
    """The true offset is at most so many µs away."""


@dataclass(frozen=True)
class Reading:
    """One comparison: rank 0 read its clock after this rank's was at `before`, and before it was at `after`, in ns."""

    before: int
    after: int
    root: int


def clock_offset(
    control: ControlChannel, host: str, *, timeout: float, clock: Callable[[], int] = time.time_ns
) -> Offset:
    """Return how far this rank's clock is behind that of rank 0; every rank calls it.

    Ranks of one host have one clock. Others enter one exchange after the other: rank 0 reads its clock between two of
    them, after the part of this rank to the first has come, and before its own to the second is here.

    Args:
        control: the channel between the ranks.
        host: this rank's.
        timeout: seconds to wait for the others.
        clock: tells the time in ns.
    """
    hosts = control.exchange(host.encode(), timeout=timeout)
    if len(set(hosts)) == 1:
        return Offset(0.0, 0.0)
    readings, before = [], clock()
    control.exchange(b"", timeout=timeout)
    for _ in range(ROUNDS):
        entered = clock()
        roots = control.exchange(json.dumps(clock()).encode(), timeout=timeout)
        readings.append(Reading(before, clock(), json.loads(roots[0])))
        before = entered
    return Offset(0.0, 0.0) if hosts[0] == host.encode() else offset_of(readings)


def offset_of(readings: Sequence[Reading]) -> Offset:
    """Return the offset that fits all readings and is nearest to 0: clocks that may agree are taken to agree."""
    least = max(reading.root - reading.after for reading in readings) / 1000
    most = min(reading.root - reading.before for reading in readings) / 1000
    offset = min(max(0.0, least), most)
    return Offset(offset, max(most - offset, offset - least))
