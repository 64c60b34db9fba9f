"""Find the rank for which the others wait, from the time that each rank spends alone in its steps.

In synchronous training all steps take as long as the slowest rank's. Ranks differ in the time between their steps, and
in the share of the time within them in which their threads run: the watchdog looks once a second.
"""

import json
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.compat.tensorflow import is_compute_thread
from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.hang.signs import Activity, Block
from hvdtrain.runtime.logs import LOGGER

FEWEST_BLOCKS = 4
APART = 0.1
"""A rank is named that costs the others a tenth of a step …"""
MOSTLY = 0.75
"""… in so many of the blocks: one long pause on a rank is chance."""
FEWEST_LOOKS = 30
"""Looks, one a second, from which the share is believed in which a rank computed within its steps."""
WINDOW_S = 60.0
_BOARD = "pace"
_MEASURED = ("step", "loading", "callbacks")
_SURE = 5.0
"""Standard errors by which shares must differ in a look that is repeated every minute; one at the end: 3."""


@dataclass
class RankTimes:
    """Time of one rank by cause."""

    host: str
    blocks: list[Block] = field(default_factory=list)
    looks: int = 0
    """At the rank within its steps."""
    working: int = 0
    """Looks at which it computed."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "RankTimes":
        """Return the times from those that `dataclasses.asdict` returned."""
        return cls(**{**values, "blocks": [Block(**block) for block in values["blocks"]]})


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
        """Return the fields, as in `summary.json`."""
        return asdict(self)


class StragglerWatch:
    """Counts when this rank works and, on rank 0, warns once of a rank that is slower than the others.

    Args:
        control: the channel with the status board.
        activity: this rank's.
        host: this rank's host name.
        works: whether a thread of this rank works just now.
        warn: called with the warning.
    """

    ends_job = False

    def __init__(
        self,
        control: ControlChannel,
        activity: Activity,
        host: str,
        *,
        works: Callable[[], bool] | None = None,
        warn: Callable[[str], object] = LOGGER.warning,
    ) -> None:
        self._control = control
        self._activity = activity
        self._host = host
        self._works = works or any_thread_runs
        self._warn = warn
        self._looked = self._since = -math.inf
        self._before = Block()
        self._windows: deque[tuple[Block, int, int]] = deque(maxlen=FEWEST_BLOCKS)
        self._looks_before = (0, 0)
        self._named: set[int] = set()
        self.latest: SlowRank | None = None
        """On rank 0: the rank that was slower than the others in the last minutes."""

    def look(self, now: float) -> None:
        """Look once, at the time `now` in seconds; more often than once a second counts as one."""
        activity = self._activity
        if activity.phase not in _MEASURED or now - self._looked < 0.9:
            return
        if now - self._looked > 10.0:
            self._since = now
        self._looked = now
        if activity.phase == "step":
            activity.looks += 1
            activity.working_looks += self._works()
        if now - self._since >= WINDOW_S:
            self._since = now
            with suppress(LaunchError):
                self._end_window()

    def _end_window(self) -> None:
        """Post the last windows; judge those of all ranks on rank 0."""
        activity = self._activity
        total, looks = activity.times.total(), (activity.looks, activity.working_looks)
        before, self._before = self._before, total
        counted, self._looks_before = self._looks_before, looks
        if total.steps < before.steps or looks < counted:  # another training
            self._windows.clear()
        elif total.steps > before.steps:
            window = Block(total.steps - before.steps, total.outside - before.outside, total.inside - before.inside)
            self._windows.append((window, looks[0] - counted[0], looks[1] - counted[1]))
            blocks, seen, worked = zip(*self._windows, strict=True)
            times = RankTimes(self._host, list(blocks), sum(seen), sum(worked))
            self._control.post(_BOARD, json.dumps(asdict(times)).encode())
            if self._control.rank == 0:
                messages = self._control.read(_BOARD)
                times_of_all = [RankTimes.of(json.loads(messages[rank])) for rank in sorted(messages)]
                complete = len(times_of_all) == self._control.size
                self.latest = slow = slowest_rank(times_of_all, sure=_SURE) if complete else None
                if slow is not None and slow.rank not in self._named:
                    self._named.add(slow.rank)
                    self._warn(
                        f"rank {slow.rank} ({slow.host}) is slower than the others, which wait for it: "
                        f"{slow.own_ms:.1f} ms of its own in each step, against {slow.others_ms:.1f} ms (median). Look "
                        "for other programs, a slower or hotter machine, or callbacks and data of this rank alone."
                    )


def slowest_rank(times: Sequence[RankTimes], *, sure: float = 3.0) -> SlowRank | None:
    """Return the rank that costs the others a tenth of their time or more, throughout; None if there is none.

    Args:
        times: of all ranks, in rank order.
        sure: standard errors by which the shares of looks at which ranks compute must differ.
    """
    blocks = list(zip(*(rank.blocks for rank in times), strict=False))
    if len(times) < 2 or len(blocks) < FEWEST_BLOCKS:
        return None
    looks, shares = min(each.looks for each in times), None
    if looks >= FEWEST_LOOKS:  # else all are taken to compute alike within their steps
        worked = [each.working / each.looks for each in times]
        chance = sure * math.sqrt(2 * 0.25 / looks)
        if max(max(worked) - statistics.median(worked), max(worked) - min(worked)) > chance:
            shares = worked

    def costs(own: Sequence[float], rank: int) -> float:
        return own[rank] - statistics.median(seconds for each, seconds in enumerate(own) if each != rank)

    slow: list[int | None] = []
    for block in blocks:
        own = _own_times(block, shares)
        slowest = own.index(max(own))
        slow.append(slowest if costs(own, slowest) >= APART * _step_seconds(block) else None)
    rank = statistics.mode(slow)
    if rank is None or slow.count(rank) < MOSTLY * len(slow):
        return None
    whole = [Block.sum_of(each.blocks) for each in times]
    own = _own_times(whole, shares)
    lost = costs(own, rank)
    return SlowRank(
        rank=rank,
        host=times[rank].host,
        own_ms=1000.0 * own[rank],
        others_ms=1000.0 * (own[rank] - lost),
        share=min(1.0, lost / _step_seconds(whole)),
    )


def _own_times(block: Sequence[Block], shares: Sequence[float] | None) -> list[float]:
    """Return each rank's own seconds per step.

    If compute fractions are unknown, all ranks are assumed to compute as long as the fastest one is in its steps; the
    rest is waiting.
    """
    inside = [each.inside / each.steps for each in block]
    computing = [min(inside)] * len(inside) if shares is None else [a * b for a, b in zip(inside, shares, strict=True)]
    return [each.outside / each.steps + own for each, own in zip(block, computing, strict=True)]


def _step_seconds(block: Sequence[Block]) -> float:
    return max((each.outside + each.inside) / each.steps for each in block)


def any_thread_runs() -> bool:
    """Return whether the main thread, or one of TensorFlow's, runs, wants to run, or waits for a disk."""
    main = threading.main_thread().native_id
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError, IndexError):  # a thread that has just ended
            head, _, rest = (task / "stat").read_text().rpartition(")")
            counts = task.name == str(main) or is_compute_thread(head.partition("(")[2])
            if counts and rest.split()[0] in ("R", "D"):
                return True
    return False
