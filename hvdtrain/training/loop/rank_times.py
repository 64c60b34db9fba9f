"""Find stragglers: compare the ranks' own work per step at the end of training."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.runtime.hang.signs import Activity

WARM_UP_STEPS = 5
"""Initial steps that do not count: they compile and fill buffers."""
MOST_BLOCKS = 16
"""Bound on blocks of steps; beyond it, pairs are merged, for constant memory."""
FEWEST_BLOCKS = 4
FIRST_BLOCK_STEPS = 4
APART = 0.1
"""Report a straggler only if it delays the others by at least 10 % of a step …"""
MOSTLY = 0.75
"""… in this fraction of the blocks: a single long pause is chance."""
FEWEST_LOOKS = 30
"""Samples, one per second, needed to estimate a rank's compute fraction."""


@dataclass
class Block:
    """Consecutive steps of one rank."""

    steps: int = 0
    outside: float = 0.0
    """Seconds between steps: reading data, callbacks."""
    inside: float = 0.0
    """Seconds in steps, including waits for other ranks."""

    def add(self, other: "Block") -> None:
        """Merge `other`."""
        self.steps += other.steps
        self.outside += other.outside
        self.inside += other.inside


@dataclass
class RankTimes:
    """Breakdown of one rank's time."""

    host: str
    blocks: list[Block] = field(default_factory=list)
    looks: int = 0
    """Samples taken within its steps."""
    working: int = 0
    """Samples in which it computed."""

    @property
    def share(self) -> float:
        """Fraction of the time in steps in which the rank computed."""
        return self.working / self.looks

    def encode(self) -> bytes:
        """Serialize the times."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> "RankTimes":
        """Deserialize the times."""
        values = json.loads(message)
        return cls(**{**values, "blocks": [Block(**block) for block in values["blocks"]]})


class StepTimer:
    """Records the durations of this rank's steps and of the time between.

    Steps after a measured step do not count: ranks synchronize between them.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._size = FIRST_BLOCK_STEPS
        self._ended: float | None = None
        self.blocks: list[Block] = []

    def pause(self) -> None:
        """Exclude the time until the next step."""
        self._ended = None

    def note(self, begin: float, end: float) -> None:
        """Record a step from `begin` to `end`, in seconds of one clock."""
        before, self._ended = self._ended, end
        self._seen += 1
        if before is None or self._seen <= WARM_UP_STEPS:
            return
        if not self.blocks or self.blocks[-1].steps == self._size:
            self._open_block()
        self.blocks[-1].add(Block(1, begin - before, end - begin))

    def _open_block(self) -> None:
        if len(self.blocks) == MOST_BLOCKS:
            pairs = zip(self.blocks[::2], self.blocks[1::2], strict=True)
            self.blocks = [_sum(pair) for pair in pairs]
            self._size *= 2
        self.blocks.append(Block())


TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A straggler."""

    rank: int
    host: str
    own_ms: float
    """Its own work per step, in ms."""
    others_ms: float
    """The others' own work, median."""
    share: float
    """Fraction of a step for which the others wait for it."""

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of `summary.json`."""
        return asdict(self)


def find_slowest_rank(backend: Backend, timer: StepTimer, activity: Activity, host: str) -> SlowRank | None:
    """Find the straggler, if any; the same on every rank. Collective."""
    if backend.job_size == 1 or backend.capabilities.asynchronous:
        return None
    mine = RankTimes(host, timer.blocks, activity.looks, activity.working_looks)
    messages = backend.gather_bytes(mine.encode(), timeout=TIMEOUT_S)
    return slowest_rank([RankTimes.decode(message) for message in messages])


def slowest_rank(times: Sequence[RankTimes]) -> SlowRank | None:
    """Return the rank that consistently costs the others at least 10 % of their time, else None."""
    blocks = list(zip(*(rank.blocks for rank in times), strict=False))
    if len(times) < 2 or len(blocks) < FEWEST_BLOCKS:
        return None
    shares = _believable_shares(times)
    slow = [_slowest(_own_times(block, shares), block) for block in blocks]
    rank = statistics.mode(slow)
    if rank is None or slow.count(rank) < MOSTLY * len(slow):
        return None
    whole = [_sum(each.blocks) for each in times]
    own = _own_times(whole, shares)
    others = _others(own, rank)
    share = (own[rank] - others) / _step_seconds(whole)
    return SlowRank(
        rank=rank, host=times[rank].host, own_ms=1000.0 * own[rank], others_ms=1000.0 * others, share=min(1.0, share)
    )


def _believable_shares(times: Sequence[RankTimes]) -> list[float] | None:
    """Return the ranks' compute fractions; None if their differences may be chance."""
    looks = min(each.looks for each in times)
    if looks < FEWEST_LOOKS:
        return None
    shares = [each.share for each in times]
    chance = 3.0 * math.sqrt(2 * 0.25 / looks)
    return shares if max(shares) - statistics.median(shares) > chance or max(shares) - min(shares) > chance else None


def _own_times(block: Sequence[Block], shares: Sequence[float] | None) -> list[float]:
    """Return each rank's own seconds per step.

    If compute fractions are unknown, all ranks are assumed to compute as long as the fastest one is in its steps; the
    rest is waiting.
    """
    inside = [each.inside / each.steps for each in block]
    computing = [min(inside)] * len(inside) if shares is None else [a * b for a, b in zip(inside, shares, strict=True)]
    return [each.outside / each.steps + own for each, own in zip(block, computing, strict=True)]


def _slowest(own: Sequence[float], block: Sequence[Block]) -> int | None:
    rank = max(range(len(own)), key=lambda each: own[each])
    return rank if own[rank] - _others(own, rank) >= APART * _step_seconds(block) else None


def _others(own: Sequence[float], rank: int) -> float:
    return statistics.median(seconds for each, seconds in enumerate(own) if each != rank)


def _step_seconds(block: Sequence[Block]) -> float:
    return max((each.outside + each.inside) / each.steps for each in block)


def _sum(blocks: Sequence[Block]) -> Block:
    total = Block()
    for block in blocks:
        total.add(block)
    return total
