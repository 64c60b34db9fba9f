"""Progress of this rank, and the time since the last."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.runtime.hang.position import Position, State, current_position, with_collectives
from hvdtrain.runtime.hang.signs import Activity, Phase, Signs, SignsOfLife

_BELIEVED = 12
"""Times the hang timeout for which work that shows no step is believed to be work: an hour at the default."""

_ONE_LOOK = 0.15
"""Share of the hang timeout that one look may show, besides the seconds in which the channel did not answer."""
_SIGNS_EVERY_S = 3.0
"""A look at the signs reads a file for each thread that computes."""
_WAITING: tuple[State, ...] = ("collective", "exchange", "leaving")
"""States in which a rank waits for others, whatever its phase."""


@dataclass(frozen=True)
class Report:
    """Posted state of a rank."""

    state: State = "code"
    phase: Phase = ""
    step: int | None = None
    idle: float = 0.0
    """Seconds in which the rank has not gone on."""
    collectives: tuple[str, ...] = ()
    """Names, in one of which the rank waits; as far as they are known."""
    where: str = ""
    host: str = ""
    pid: int = 0
    pid_space: str = ""
    """The kernel's namespace of process numbers: within it, ranks of one host can send one another signals."""

    def encode(self, beat: int) -> bytes:
        """Return the report as bytes, which differ from beat to beat."""
        return json.dumps([beat, asdict(self)]).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Report":
        """Return the report of a message."""
        _, values = json.loads(message)
        return cls(**{**values, "collectives": tuple(values["collectives"])})


class ProgressWatch:
    """Looks now and then where this rank stands, and counts the seconds in which it did not go on.

    A rank goes on where its step or phase changes, where it makes another call into TensorFlow, Keras, Horovod or the
    control channel, and while it is in a debugger. Where none of that is so, it may still be at work:

    - in training while it opens its data, for `load_timeout` seconds;
    - while it reads a batch, for twice as long as the slowest one took so far;
    - while it saves, and does not wait for other ranks: a slow disk shows no sign of life;
    - within a call of TensorFlow, in a read of data, compiling or in evaluation, while its threads compute or, outside
      of collectives, move data;
    - in code of the user's own, while its threads read or write, or child processes work. That it computes is no sign:
      an endless loop does so, too.

    What is said of saving, computing and moving data is believed for 12 times the hang timeout.

    Args:
        activity: what training says of this rank.
        timeout: the hang timeout, in seconds.
        load_timeout: seconds in which data are opened.
        locate: returns where this rank stands.
        signs: of life.
        clock: returns seconds.
    """

    def __init__(
        self,
        activity: Activity,
        timeout: float,
        load_timeout: float,
        *,
        locate: Callable[[], Position] = current_position,
        signs: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._activity = activity
        self._timeout = timeout
        self._load_timeout = load_timeout
        self._locate = locate
        self._signs = signs or SignsOfLife()
        self._clock = clock
        self._place: tuple[Any, ...] = ()
        self._position = Position("code", None, None, "")
        self._looked_into = False
        self.went_on()

    def went_on(self) -> None:
        """Count from now on."""
        self._looked = self._next_signs = self._clock()
        self._still = self._idle = 0.0
        self._signs.forget()

    def look(self, unanswered: float = 0.0) -> Report:
        """Return where this rank stands and for how long already.

        Args:
            unanswered: seconds since the look before in which its thread waited for the control channel in vain.
        """
        activity, position, now = self._activity, self._locate(), self._clock()
        phase, step = activity.phase, activity.step
        place = (phase, step, activity.reads, position.anchor, position.state)
        if position.state == "debugger" or place != self._place:
            self.went_on()
            self._place, self._position, self._looked_into = place, position, False
        else:
            # A look that came late, since another thread held Python's lock or the machine was busy, shows little. One
            # that came late since the channel did not answer shows as much as any: this rank could have gone on.
            since, self._looked = now - self._looked, now
            explained = min(unanswered, since)
            passed = explained + min(since - explained, self._timeout * _ONE_LOOK)
            self._still += passed
            if not self._looked_into:
                self._position, self._looked_into = with_collectives(self._position), True
            self._idle = 0.0 if self._works(self._position, now) else self._idle + passed
        return Report(
            state=self._position.state,
            phase=phase,
            step=step,
            idle=self._idle,
            collectives=self._position.collectives,
            where=activity.exit or position.where,
        )

    def _works(self, position: Position, now: float) -> bool:
        """Return whether this rank, which shows no progress, is believed to work."""
        activity, seconds = self._activity, self._still
        if activity.opens_data:
            return seconds < self._load_timeout
        if activity.phase == "loading" and seconds < 2 * activity.longest_read:
            return True
        if seconds >= _BELIEVED * self._timeout:
            return False
        if activity.phase == "saving" and position.state not in _WAITING:
            return True
        if now < self._next_signs:
            return False
        self._next_signs = now + min(_SIGNS_EVERY_S, self._timeout / 10)
        return shows_work(self._signs.look(), position.state, activity.phase)


def shows_work(signs: Signs, state: State, phase: Phase) -> bool:
    """Return whether the signs of life of a rank that stands there are those of work."""
    if state in ("exchange", "leaving"):
        return False
    if state == "collective":
        return signs.computes
    if state in ("reading", "function") or phase in ("loading", "compiling", "evaluation"):
        return signs.computes or signs.helpers_compute or signs.moves_data
    return signs.helpers_compute or signs.moves_data
