"""Signs of life of this process: what it does, the time its threads compute, the bytes that they read and write.

Threads of Horovod and MPI do not count: they turn for as long as a job stands still. Linux only; elsewhere there are no
signs.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.compat.tensorflow import is_compute_thread

Phase = Literal["", "loading", "compiling", "step", "callbacks", "evaluation", "saving"]

WARM_UP_STEPS = 5
"""Steps at the start that do not count: they compile, and fill buffers."""
MOST_BLOCKS = 16
"""Blocks of steps that are kept; when there are more, two become one, so that memory does not grow."""
FIRST_BLOCK_STEPS = 4


@dataclass
class Block:
    """Consecutive steps of one rank."""

    steps: int = 0
    outside: float = 0.0
    """Seconds between steps: reading data, callbacks."""
    inside: float = 0.0
    """Seconds in steps, including waits for other ranks."""

    def add(self, other: "Block") -> None:
        self.steps += other.steps
        self.outside += other.outside
        self.inside += other.inside

    @classmethod
    def sum_of(cls, blocks: Iterable["Block"]) -> "Block":
        """Return the sum of `blocks`."""
        total = cls()
        for block in blocks:
            total.add(block)
        return total


class StepTimer:
    """Records the durations of this rank's steps and of the time between.

    Steps after a measured step do not count: ranks synchronize between them. Where they do so after every step, they
    say so by `waiting`.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._size = FIRST_BLOCK_STEPS
        self._ended: float | None = None
        self._waited = 0.0
        self.blocks: list[Block] = []

    def pause(self) -> None:
        """Exclude the time until the next step."""
        self._ended = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of an exchange between two steps, in which this rank waits for slower ones."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - begin

    def note(self, begin: float, end: float) -> None:
        """Record a step from `begin` to `end`, in seconds of one clock."""
        before, self._ended = self._ended, end
        waited, self._waited = self._waited, 0.0
        self._seen += 1
        if before is None or self._seen <= WARM_UP_STEPS:
            return
        if not self.blocks or self.blocks[-1].steps == self._size:
            if len(self.blocks) == MOST_BLOCKS:
                pairs = zip(self.blocks[::2], self.blocks[1::2], strict=True)
                self.blocks = [Block.sum_of(pair) for pair in pairs]
                self._size *= 2
            self.blocks.append(Block())
        self.blocks[-1].add(Block(1, begin - before - waited, end - begin + waited))

    def total(self) -> Block:
        """Return the sum of all steps; for any thread."""
        return Block.sum_of(list(self.blocks))


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
        self.times = StepTimer()
        """The times of its steps."""
        self.exit = ""
        """The exit by which the script left, "sys.exit(0) at train.py:12", once it has; empty where it returned."""

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context of a training, after which nothing is known of what the script does."""
        self.reads, self.longest_read = 0, 0.0
        self.looks = self.working_looks = 0
        self.times = StepTimer()
        try:
            yield
        finally:
            self.phase, self.step = "", None

    def note_read(self, seconds: float) -> None:
        """Note that a batch was read, for which the step waited so long."""
        self.reads += 1
        self.longest_read = max(self.longest_read, seconds)

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


_TICK = os.sysconf("SC_CLK_TCK")
_COMPUTES = 0.02
"""Share of a core. A process that waits for others takes less than a tick (10 ms) a second outside of Horovod."""
_MOVES = 2**16
"""Bytes a second. A loop that polls a file for a mark moves a few."""


@dataclass(frozen=True)
class Signs:
    """Observations since the last look."""

    computes: bool = False
    """Whether the main thread or TensorFlow's did."""
    helpers_compute: bool = False
    """Whether other Python threads or child processes did, which may read data."""
    moves_data: bool = False
    """Whether any thread read or wrote."""


@dataclass(frozen=True)
class _Work:
    """Work of this process since it began: seconds by kind of thread, and bytes."""

    time: float
    own: float
    helpers: float
    children: float
    moved: int


class SignsOfLife:
    """Compares what the threads of this process have done by now with the look before.

    It opens few files: with each, another thread may take Python's lock and keep it for 5 ms.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let the next look be the first."""
        self._before: _Work | None = None
        self._of_tensorflow: list[int] = []

    def look(self) -> Signs:
        """Return the signs since the look before; there are none at the first."""
        if self._before is None:
            for task in _entries(Path("/proc/self/task")):
                with suppress(OSError):  # a thread that has just ended
                    if is_compute_thread((task / "comm").read_text()):
                        self._of_tensorflow.append(int(task.name))
        before, now = self._before, self._work_so_far()
        self._before = now
        if before is None:
            return Signs()
        seconds = now.time - before.time
        much = max(_COMPUTES * seconds, 2.5 / _TICK)  # between two looks, one tick is chance
        return Signs(
            now.own - before.own >= much,
            max(now.helpers - before.helpers, now.children - before.children) >= much,
            now.moved - before.moved >= _MOVES * max(seconds, 0.1),
        )

    def _work_so_far(self) -> _Work:
        now, main = time.monotonic(), threading.main_thread()
        threads = [each for each in threading.enumerate() if not each.name.startswith("hvdtrain-")]
        helpers = [each.native_id for each in threads if each.native_id is not None and each is not main]
        own = [*([] if main.native_id is None else [main.native_id]), *self._of_tensorflow]
        return _Work(
            time=now,
            own=sum(map(_seconds_of, own)),
            helpers=sum(map(_seconds_of, helpers)),
            children=sum(_seconds_of_children(Path("/proc/self"), 4)),
            moved=sum(map(_bytes_of, [*own, *helpers])),
        )


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _seconds_of(thread: int) -> float:
    """Return for how long a thread of this process has computed, by its clock (pthread_getcpuclockid(3))."""
    try:
        return time.clock_gettime((~thread << 3) | 6)
    except OSError:  # it has just ended
        return 0.0


def _bytes_of(thread: int) -> int:
    """Return how many bytes a thread of this process has read and written."""
    try:
        lines = dict(line.split(": ") for line in Path(f"/proc/self/task/{thread}/io").read_text().splitlines())
        return sum(int(lines[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
    except (OSError, ValueError, KeyError):
        return 0


def _seconds_of_children(process: Path, depth: int) -> Iterator[float]:
    """Yield for how long each child process has computed, and each of theirs: a script's readers and commands."""
    if process.name == "self":  # threads of Python alone start others here
        tasks = [process / "task" / str(thread.native_id) for thread in threading.enumerate()]
    else:
        tasks = _entries(process / "task")
    for task in tasks:
        with suppress(OSError):
            for number in (task / "children").read_text().split():
                child = Path("/proc", number)
                with suppress(OSError, ValueError, IndexError):
                    fields = (child / "stat").read_text().rpartition(")")[2].split()
                    yield (int(fields[11]) + int(fields[12])) / _TICK
                if depth > 1:
                    yield from _seconds_of_children(child, depth - 1)
