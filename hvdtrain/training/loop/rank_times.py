"""Which rank the others wait for: what each rank does alone in a step, compared over all ranks at the end."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.runtime.hang.signs import Activity

WARM_UP_STEPS = 5
"""Steps at the start that do not count: they compile, and fill buffers."""
MOST_BLOCKS = 16
"""Blocks of steps that are kept; when there are more, two become one, so that memory does not grow."""
FEWEST_BLOCKS = 4
FIRST_BLOCK_STEPS = 4
APART = 0.1
"""A rank is named that costs the others a tenth of a step …"""
MOSTLY = 0.75
"""… in so many of the blocks: one long pause on a rank is chance."""
FEWEST_LOOKS = 30
"""Looks, one a second, from which the share is believed in which a rank computed within its steps."""


@dataclass
class Block:
    """Some consecutive steps of one rank."""

    steps: int = 0
    outside: float = 0.0
    """Seconds between the steps: reading data, callbacks."""
    inside: float = 0.0
    """Seconds in the steps, those in which it waited for other ranks among them."""

    def add(self, other: "Block") -> None:
        """Count the steps of `other` as well."""
        self.steps += other.steps
        self.outside += other.outside
        self.inside += other.inside


@dataclass
class RankTimes:
    """Where the time of one rank went."""

    host: str
    blocks: list[Block] = field(default_factory=list)
    looks: int = 0
    """At the rank within its steps."""
    working: int = 0
    """Looks at which it computed."""

    @property
    def share(self) -> float:
        """The share of the time in its steps in which the rank computed."""
        return self.working / self.looks

    def encode(self) -> bytes:
        """Return the times as a message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> "RankTimes":
        """Return the times in a message."""
        values = json.loads(message)
        return cls(**{**values, "blocks": [Block(**block) for block in values["blocks"]]})


class StepTimer:
    """Notes for each step of this rank how long it took, and what came before it.

    Steps whose predecessor was measured do not count: ranks meet between them.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._size = FIRST_BLOCK_STEPS
        self._ended: float | None = None
        self.blocks: list[Block] = []

    def pause(self) -> None:
        """Leave out the time until the next step."""
        self._ended = None

    def note(self, begin: float, end: float) -> None:
        """Count a step from `begin` to `end`, in seconds of one clock."""
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
    """A rank for which the others wait."""

    rank: int
    host: str
    own_ms: float
    """What it does alone in a step, in ms."""
    others_ms: float
    """What the others do, the median."""
    share: float
    """Share of a step for which the others wait for it."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as `summary.json` names it."""
        return asdict(self)


def find_slowest_rank(backend: Backend, timer: StepTimer, activity: Activity, host: str) -> SlowRank | None:
    """Compare what the ranks did alone in their steps; every rank calls it, and gets the same answer."""
    if backend.job_size == 1 or backend.capabilities.asynchronous:
        return None
    mine = RankTimes(host, timer.blocks, activity.looks, activity.working_looks)
    messages = backend.gather_bytes(mine.encode(), timeout=TIMEOUT_S)
    return slowest_rank([RankTimes.decode(message) for message in messages])


def slowest_rank(times: Sequence[RankTimes]) -> SlowRank | None:
    """Return the rank that costs the others a tenth of their time or more, throughout; None where there is none."""
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
    """Return the shares in which ranks compute within steps; None where they differ no more than by chance."""
    looks = min(each.looks for each in times)
    if looks < FEWEST_LOOKS:
        return None
    shares = [each.share for each in times]
    chance = 3.0 * math.sqrt(2 * 0.25 / looks)
    return shares if max(shares) - statistics.median(shares) > chance or max(shares) - min(shares) > chance else None


def _own_times(block: Sequence[Block], shares: Sequence[float] | None) -> list[float]:
    """Return the seconds that each rank works alone in a step.

    Where nothing tells the computing of the ranks apart, it is taken for that of the rank which was in its steps for
    the shortest time: what others took longer, they waited.
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
