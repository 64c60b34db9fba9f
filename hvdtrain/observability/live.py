"""The live display of a run on a terminal."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from hvdtrain.observability import wording
from hvdtrain.observability.events import BaseObserver, EpochRecord, EvaluationRecord, RunInfo, StepRecord
from hvdtrain.observability.pace import Pace

MIN_SECONDS_BETWEEN_DRAWS = 0.125
"""Eight times a second looks continuous."""

LARGEST_SHARE = 0.005
"""Fraction of the time that drawing may take; a slow terminal is redrawn less often."""


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
        where = fitting(self._where(), options.max_width)
        bar = min(40, options.max_width - len(where) - 3)
        if bar >= 8:
            yield ProgressBar(self._info.total_steps, self.step, width=bar)
            where = "  " + where
        yield Text(where, no_wrap=True)
        yield Text(fitting(self._figures(), options.max_width), no_wrap=True)

    def _where(self) -> list[str]:
        epoch = self._info.epoch_of(self.step) + 1
        parts = [
            f"step {wording.count_of(self.step, self._info.total_steps)}",
            f"epoch {wording.count_of(epoch, self._info.epochs)}",
        ]
        return parts if self.finished else parts + [f"ETA {wording.duration(self.remaining)}"]

    def _figures(self) -> list[str]:
        if not self.trained:
            return ["waiting for the first figures"]
        # Loss and first metric of training and validation come first, for narrow terminals.
        figures = self.trained[:2] + self.evaluated[1:2] + self.evaluated[:1]
        return [*wording.formatted(figures), self.speed]


def fitting(parts: Iterable[str], width: int) -> str:
    """Return as many of `parts`, from the left, as fit on a line of `width` columns."""
    line = ""
    for part in parts:
        longer = wording.joined(line, part) if line else part
        if len(longer) >= width:
            break
        line = longer
    return line


class CopiedStream:
    """A stream that writes to a log as well."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        """Write `text` to both; a log that cannot be written is passed over."""
        with suppress(OSError, ValueError):
            self._log.write(text)
            self._log.flush()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LiveConsole(BaseObserver):
    """A progress bar with the latest figures under it; epochs and messages scroll by above.

    Other output appears above the display as well.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        console: Console | None = None,
        log: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._console = console or Console(file=stream, highlight=False)
        self._log = log
        self._clock = clock
        self._live: Live | None = None
        self._next_draw = 0.0

    @property
    def output(self) -> str:
        """See `Observer`."""
        return "standard output"

    def on_start(self, info: RunInfo) -> None:
        """Print the header of the run, and start the display."""
        self._info = info
        self._pace = Pace(info=info)
        self._frame = Frame(info)
        self._print_block(wording.header(info))
        # Standard error may be redirected to a file: leave it alone.
        self._live = Live(self._frame, console=self._console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
        self._live.start(refresh=True)
        if self._log is not None:
            # The display has put streams of its own in their place, and takes them away at its end.
            sys.stdout = cast(TextIO, CopiedStream(sys.stdout, self._log))
            if sys.stderr.isatty():
                sys.stderr = cast(TextIO, CopiedStream(sys.stderr, self._log))
        # Do not hide the cursor: a killed run could not show it again.
        self._console.show_cursor(True)

    def on_progress(self, step: int) -> None:
        """Redraw if it is due."""
        now = self._clock()
        self._pace.progress(step, now)
        if now >= self._next_draw:
            self._draw(step, now)

    def on_step(self, record: StepRecord) -> None:
        """Update the figures of the display."""
        self._pace.logged(record)
        self._frame.trained = wording.step_figures(record)
        self._frame.speed = wording.rate(record.samples_per_second)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Update the figures of the display."""
        self._pace.evaluated(record.seconds)
        self._frame.evaluated = wording.evaluation_figures(record)

    def on_epoch(self, record: EpochRecord) -> None:
        """Print the epoch above the display."""
        self._pace.epoch()
        self._print(Text(wording.epoch_line(record, self._info)))

    def on_message(self, text: str) -> None:
        """Print the message above the display."""
        self._print(Text(text))

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Leave the finished display in place, and print the results under it."""
        self._frame.step, self._frame.finished = self._info.total_steps, True
        self.close()
        self._print_block(wording.ending(summary, self._info))

    def close(self) -> None:
        """Stop the display; its last state stays on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, step: int, now: float) -> None:
        self._frame.step = step
        self._frame.remaining = self._pace.remaining()
        if self._live is not None:
            self._live.refresh()
        spent = self._clock() - now
        self._next_draw = now + max(MIN_SECONDS_BETWEEN_DRAWS, spent / LARGEST_SHARE)

    def _print(self, text: Text) -> None:
        self._console.print(text)

    def _print_block(self, lines: list[tuple[str, str]]) -> None:
        for label, value in lines:
            self._print(Text.assemble((f"{label:<11} ", "bold"), value))
