"""Finds a rank that is persistently slower than the others, from what the ranks post on the status board.

In synchronous training all steps take as long as the slowest rank's. What differs is how much of that time a rank
works: the others wait for the slow one. Once a second each rank looks whether one of its threads runs.
"""

import json
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.compat.tensorflow import is_compute_thread
from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.hang.signs import Activity
from hvdtrain.runtime.logs import say

_BOARD = "pace"
_LOOKS = 60
"""In a window: a share of them is right to 0.06 (one standard deviation at worst)."""
_APART = 0.2
"""A rank is slow that works for a larger share of the time than the median rank, by so much …"""
_WINDOWS = 3
"""… in so many windows in a row. By chance that comes once in 500,000."""
_MEASURED = ("step", "loading", "callbacks")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How one rank worked in a window."""

    window: int
    host: str
    working: float
    """Share of the looks at which it worked."""
    steps: int
    seconds: float

    @property
    def step_ms(self) -> float:
        """The rank's own time for a step, without that in which it waited for others."""
        return 1000.0 * self.seconds * self.working / self.steps

    def encode(self) -> bytes:
        """Return the pace as bytes."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Pace":
        """Return the pace of a message."""
        return cls(**json.loads(message))


class StragglerWatch:
    """Counts when this rank works and, on rank 0, names a rank that is slower than the others.

    Args:
        control: the channel with the status board.
        activity: what training says of this rank.
        host: this rank's host name.
        works: tells whether a thread of this rank works just now.
        tell: tells the user.
    """

    ends_job = False

    def __init__(
        self,
        control: ControlChannel,
        activity: Activity,
        host: str,
        *,
        works: Callable[[], bool] | None = None,
        tell: Callable[[str], object] = say,
    ) -> None:
        self._control = control
        self._activity = activity
        self._host = host
        self._works = works or any_thread_runs
        self._tell = tell
        self._window = self._judged = 0
        self._slow: list[int | None] = []
        self._told: set[int] = set()
        self.latest: tuple[int, Pace] | None = None
        """On rank 0: the rank that was slower than the others in the last minute, with its pace; None: none was."""
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        self._since, self._last, self._first_step = now, now, self._activity.step
        self._looks = self._working = 0

    def look(self, now: float) -> None:
        """Look once, at the time `now` in seconds; more often than once a second counts as one."""
        if self._activity.phase not in _MEASURED:
            return
        if not self._looks or now - self._last > 10.0:
            self._begin(now)
        elif now - self._last < 0.9:
            return
        self._last = now
        self._looks += 1
        in_step = self._activity.phase == "step"
        works = not in_step or self._works()
        self._working += works
        if in_step:
            self._activity.note_look(works)
        if self._looks >= _LOOKS:
            self._end_window(now)

    def _end_window(self, now: float) -> None:
        steps = (self._activity.step or 0) - (self._first_step or 0)
        if steps > 0:
            self._window += 1
            pace = Pace(
                window=self._window,
                host=self._host,
                working=self._working / self._looks,
                steps=steps,
                seconds=now - self._since,
            )
            with suppress(LaunchError):
                self._control.post(_BOARD, pace.encode())
                if self._control.rank == 0:
                    self._judge(self._control.read(_BOARD))
        self._begin(now)

    def _judge(self, messages: Mapping[int, bytes]) -> None:
        """Name the slow rank, once, where it was the same in several windows in a row."""
        paces = {rank: Pace.decode(message) for rank, message in sorted(messages.items())}
        if len(paces) < self._control.size:
            return
        self._slow = [*self._slow, slowest(list(paces.values()))][-_WINDOWS:]
        rank = self._slow[-1]
        self.latest = None if rank is None else (rank, paces[rank])
        if rank is not None and self._slow == [rank] * _WINDOWS and rank not in self._told:
            self._told.add(rank)
            self._tell(f"hvdtrain: warning: {describe(rank, paces)}")


def slowest(paces: Sequence[Pace]) -> int | None:
    """Return the rank for which the others wait, if there is one; `paces` are those of all ranks."""
    rank = max(range(len(paces)), key=lambda each: paces[each].working)
    others = [pace.working for each, pace in enumerate(paces) if each != rank]
    return rank if paces[rank].working - statistics.median(others) >= _APART else None


def describe(rank: int, paces: Mapping[int, Pace]) -> str:
    """Return what the user is told of a slow rank."""
    others = statistics.median(pace.step_ms for each, pace in paces.items() if each != rank)
    return (
        f"rank {rank} ({paces[rank].host}) is slower than the others, which wait for it: {paces[rank].step_ms:.1f} ms "
        f"of its own in each step, against {others:.1f} ms (median). Look for other programs, a slower or hotter "
        "machine, or callbacks and data of this rank alone."
    )


def any_thread_runs() -> bool:
    """Tell whether the main thread, or one of TensorFlow's, runs, wants to run, or waits for a disk."""
    main = threading.main_thread().native_id
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError, IndexError):  # a thread that has just ended
            head, _, rest = (task / "stat").read_text().rpartition(")")
            counts = task.name == str(main) or is_compute_thread(head.partition("(")[2])
            if counts and rest.split()[0] in ("R", "D"):
                return True
    return False
