"""What this rank does at the moment, as training notes it and the watchdog posts it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal["", "loading", "compiling", "step", "callbacks", "evaluation", "saving"]


class Activity:
    """Phase and step of a rank. Setting them costs nothing: plain attributes, read by the watchdog now and then."""

    def __init__(self) -> None:
        self.phase: Phase = ""
        """Empty outside of training, and in loops of a script's own."""
        self.step: int | None = None
        """The optimizer step under way, counted from 1; None outside of training."""
        self.reads = 0
        """Batches that the training under way has read."""
        self.longest_read = 0.0
        """Seconds for which it waited for one of them."""
        self.looks = 0
        """Looks at this rank within its steps, about one a second."""
        self.working_looks = 0
        """Those at which it computed."""
        self.exit = ""
        """The exit by which the script left, "sys.exit(0) at train.py:12", once it has; empty where it returned."""

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context of a training, after which nothing is known of what the script does."""
        self.reads, self.longest_read = 0, 0.0
        self.looks = self.working_looks = 0
        try:
            yield
        finally:
            self.phase, self.step = "", None

    def note_read(self, seconds: float) -> None:
        """Note that a batch was read, for which the step waited so long."""
        self.reads += 1
        self.longest_read = max(self.longest_read, seconds)

    def note_look(self, working: bool) -> None:
        """Note whether the rank computed at a look within a step."""
        self.looks += 1
        self.working_looks += working

    @property
    def opens_data(self) -> bool:
        """Whether it reads one of its first two batches: the first may have been kept since the model was built."""
        return self.phase == "loading" and self.reads < 2

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Context of a phase within another one."""
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = outer
