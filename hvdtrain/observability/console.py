"""Progress of a training: lines of the logger `hvdtrain.progress`, and a live display on a terminal."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import median_low
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from hvdtrain.observability import wording
from hvdtrain.observability.events import EpochRecord, EvaluationRecord, Observer, Observers, RunInfo, StepRecord
from hvdtrain.runtime.logs import PROGRESS

MIN_SECONDS_BETWEEN_LINES = 2.0
"""More step lines than this would hide the epochs in a log."""
MIN_SECONDS_BETWEEN_DRAWS = 0.125
"""Eight times a second looks continuous."""
LARGEST_SHARE = 0.005
"""Fraction of the time that drawing may take; a slow terminal is redrawn less often."""
COMPILING_STEPS = 2
"""The first step compiles the step that is logged, the second the one that is not."""
KEPT_WINDOWS = 51
"""Windows between two logged steps whose median is the pace: one in which a short batch is compiled does not count."""


def make_console(*, live: bool, steps: bool = True) -> Observers:
    """Return the observer that reports progress: in lines, and on a live display if `live`.

    Args:
        live: standard output is a terminal that can move its cursor. Lines of epochs then scroll by above the display.
        steps: write lines of logged steps too where there is no display.
    """
    lines = PlainConsole(min_seconds=MIN_SECONDS_BETWEEN_LINES if steps else None)
    return Observers([LiveDisplay(sys.stdout) if live else lines])


class Pace:
    """Estimates the remaining time of a run: steps at their usual pace, and evaluations as long as the shortest so far.

    Between its first logged steps the pace is the mean since the first ones were compiled.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._step = self._first = info.start_step
        self._now = self._since = 0.0
        self._calls = 0
        """Of those that compile."""
        self._windows: deque[float] = deque(maxlen=KEPT_WINDOWS)
        self._logged: int | None = None
        self._evaluations: list[float] = []
        self._epochs = 0

    def progress(self, step: int, now: float) -> None:
        """Note that `step` steps are finished at time `now`: one more, or several that were taken in one call."""
        self._step, self._now = step, now
        if self._calls < COMPILING_STEPS:
            self._first, self._since = step, now
            self._calls += 1

    def logged(self, record: StepRecord) -> None:
        """Note the throughput since the last logged step."""
        before, self._logged = self._logged, record.step
        clean = before is not None and before >= self._info.start_step + COMPILING_STEPS
        if clean and record.samples_per_second > 0:
            self._windows.append(self._info.global_batch / record.samples_per_second)

    def evaluated(self, seconds: float) -> None:
        """Note an evaluation, whose time is none of the steps'."""
        self._evaluations.append(seconds)
        self._since += seconds

    def epoch(self) -> None:
        """Note the end of an epoch."""
        self._epochs += 1

    def remaining(self) -> float | None:
        """Return the seconds left; None if unknown yet."""
        left, taken = self._info.total_steps - self._step, self._step - self._first
        if left <= 0:
            return 0.0
        if self._windows:
            seconds = left * median_low(self._windows)
        elif taken > 0:
            seconds = left * max(0.0, self._now - self._since) / taken
        else:
            return None
        if self._evaluations and self._epochs:  # those to come are as frequent as those so far
            epochs = self._info.epochs - self._info.epoch_of(self._info.start_step + 1) - self._epochs
            seconds += max(0, epochs) * min(self._evaluations) * len(self._evaluations) / self._epochs
        return seconds


class PlainConsole(Observer):
    """Logs a line per logged step, at most every two seconds, and one per epoch.

    Launchers put a prefix such as ``[1,0]<stdout>:`` before each line, so no line is ever overwritten.

    Args:
        min_seconds: time between two lines of steps; None for lines of epochs alone.
        say: logs a line.
        clock: returns the time in seconds.
    """

    output = "standard output"

    def __init__(
        self,
        *,
        min_seconds: float | None = MIN_SECONDS_BETWEEN_LINES,
        say: Callable[[str], None] = PROGRESS.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._min_seconds = min_seconds
        self._clock = clock
        self._last_line: float | None = None
        self._unsaid: StepRecord | None = None

    def on_start(self, info: RunInfo) -> None:
        self._info = info
        self._pace = Pace(info=info)
        self._say_block(wording.header(info))

    def on_progress(self, step: int) -> None:
        self._pace.progress(step, self._clock())

    def on_step(self, record: StepRecord) -> None:
        self._pace.logged(record)
        if self._min_seconds is None:
            return
        now = self._clock()
        self._unsaid = record
        if self._last_line is None or now - self._last_line >= self._min_seconds:
            self._last_line = now
            self._say_step()

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._pace.evaluated(record.seconds)

    def on_epoch(self, record: EpochRecord) -> None:
        self._pace.epoch()
        if record.step >= self._info.total_steps:
            self._say_step()
        self._say(wording.epoch_line(record, self._info))

    def on_message(self, text: str) -> None:
        self._say(text)

    def on_end(self, summary: Mapping[str, Any]) -> None:
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


class Frame:
    """The two redrawn lines: progress, and the latest figures.

    Figures that do not fit the terminal's width are dropped from the right, never wrapped.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self.step = info.start_step
        self.remaining: float | None = None
        self.finished = False
        self.trained: wording.Figures = []
        self.evaluated: wording.Figures = []
        self.speed = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render within the available width."""
        epoch = self._info.epoch_of(self.step) + 1
        parts = [
            f"step {wording.count_of(self.step, self._info.total_steps)}",
            f"epoch {wording.count_of(epoch, self._info.epochs)}",
            *([] if self.finished else [f"ETA {wording.duration(self.remaining)}"]),
        ]
        where = fitting(parts, options.max_width)
        bar = min(40, options.max_width - len(where) - 3)
        if bar >= 8:
            yield ProgressBar(self._info.total_steps, self.step, width=bar)
            where = "  " + where
        yield Text(where, no_wrap=True)
        # Loss and first metric of training and validation come first, for narrow terminals.
        figures = wording.formatted(self.trained[:2] + self.evaluated[1:2] + self.evaluated[:1])
        shown = [*figures, self.speed] if self.trained else ["waiting for the first figures"]
        yield Text(fitting(shown, options.max_width), no_wrap=True)


def fitting(parts: Iterable[str], width: int) -> str:
    """Return as many of `parts`, from the left, as fit on a line of `width` columns."""
    line = ""
    for part in parts:
        longer = wording.joined(line, part) if line else part
        if len(longer) >= width:
            break
        line = longer
    return line


class LiveDisplay(PlainConsole):
    """Draws a progress bar with the latest figures under it; lines of epochs and other output scroll by above.

    The columns of `rich.progress` are not used: their estimate of the remaining time includes compiling and
    evaluations, and what does not fit the width is wrapped.
    """

    def __init__(
        self, stream: TextIO, *, console: Console | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(min_seconds=None, clock=clock)
        self._console = console or Console(file=stream, highlight=False)
        self._live: Live | None = None
        self._next_draw = 0.0

    def on_start(self, info: RunInfo) -> None:
        self._frame = Frame(info)
        # Standard error may be redirected to a file: leave it alone.
        self._live = Live(self._frame, console=self._console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
        self._live.start(refresh=True)
        self._console.show_cursor(True)  # a killed run could not show it again
        super().on_start(info)

    def on_progress(self, step: int) -> None:
        now = self._clock()
        self._pace.progress(step, now)
        if now >= self._next_draw:
            self._frame.step, self._frame.remaining = step, self._pace.remaining()
            if self._live is not None:
                self._live.refresh()
            self._next_draw = now + max(MIN_SECONDS_BETWEEN_DRAWS, (self._clock() - now) / LARGEST_SHARE)

    def on_step(self, record: StepRecord) -> None:
        super().on_step(record)
        self._frame.trained = wording.step_figures(record)
        self._frame.speed = wording.rate(record.samples_per_second)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        super().on_evaluation(record)
        self._frame.evaluated = wording.evaluation_figures(record)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._frame.step, self._frame.finished = self._info.total_steps, True
        self.close()
        super().on_end(summary)

    def close(self) -> None:
        """Stop the display; its last state stays on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None
