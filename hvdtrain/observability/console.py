"""Console output of the primary: plain lines in a log, a live display on a terminal."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from hvdtrain.observability import wording
from hvdtrain.observability.events import BaseObserver, EpochRecord, EvaluationRecord, RunInfo, StepRecord
from hvdtrain.observability.pace import Pace

MIN_SECONDS_BETWEEN_LINES = 2.0
"""More step lines than this would hide the epochs in a log."""


def make_console(
    stream: TextIO | None = None, *, live: bool, steps: bool = True, log: TextIO | None = None
) -> BaseObserver:
    """Return the live display if `live`, for a terminal that can move its cursor, else plain lines.

    Both write to `stream`, by default standard output. Without `steps` the lines are those of epochs alone. What others
    write while there is a live display goes to `log` as well.
    """
    stream = stream or sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if live:
        from hvdtrain.observability.live import LiveConsole

        return LiveConsole(stream, log=log)
    return PlainConsole(stream, min_seconds=MIN_SECONDS_BETWEEN_LINES if steps else None)


class PlainConsole(BaseObserver):
    """One line per logged step, at most every two seconds, and one per epoch, written at once.

    Launchers put a prefix such as ``[1,0]<stdout>:`` before each line, so no line is ever overwritten.

    Args:
        stream: what is written to.
        min_seconds: time between two lines of steps; None for lines of epochs alone.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        min_seconds: float | None = MIN_SECONDS_BETWEEN_LINES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._min_seconds = min_seconds
        self._clock = clock
        self._last_line: float | None = None
        self._unsaid: StepRecord | None = None

    @property
    def output(self) -> str:
        """See `Observer`."""
        return "standard output"

    def on_start(self, info: RunInfo) -> None:
        """Print what the run is."""
        self._info = info
        self._pace = Pace(info=info)
        self._say_block(wording.header(info))

    def on_progress(self, step: int) -> None:
        """Estimate the remaining time."""
        self._pace.progress(step, self._clock())

    def on_step(self, record: StepRecord) -> None:
        """Print the first step, and later ones at most every `min_seconds`."""
        self._pace.logged(record)
        if self._min_seconds is None:
            return
        now = self._clock()
        self._unsaid = record
        if self._last_line is None or now - self._last_line >= self._min_seconds:
            self._last_line = now
            self._say_step()

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Leave its time out of the steps' pace; its figures are printed with the epoch's."""
        self._pace.evaluated(record.seconds)

    def on_epoch(self, record: EpochRecord) -> None:
        """Print the epoch; after the line of the last step, if that was held back."""
        self._pace.epoch()
        if record.step >= self._info.total_steps:
            self._say_step()
        self._say(wording.epoch_line(record, self._info))

    def on_message(self, text: str) -> None:
        """Print the message as it is."""
        self._say(text)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Print the last logged step, if it was held back, and the results."""
        self._say_step()
        self._say_block(wording.ending(summary, self._info))

    def _say_step(self) -> None:
        """Print the latest logged step, unless it was printed already."""
        if self._unsaid is None:
            return
        record, self._unsaid = self._unsaid, None
        step = wording.count_of(record.step, self._info.total_steps)
        epoch = wording.count_of(record.epoch + 1, self._info.epochs)
        figures = wording.formatted(wording.step_figures(record))
        speed = wording.rate(record.samples_per_second)
        eta = wording.duration(self._pace.remaining())
        self._say(wording.joined(f"step {step}", f"epoch {epoch}", *figures, speed, f"ETA {eta}"))

    def _say_block(self, lines: list[tuple[str, str]]) -> None:
        for label, value in lines:
            self._say(f"{label:<11} {value}")

    def _say(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()
