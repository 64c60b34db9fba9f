"""Record one rank's part of the trace of the job."""

import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.observability import TraceConfig
from hvdtrain.runtime.control.channel import ControlChannel, gather
from hvdtrain.runtime.hang.signs import Activity, Phase
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.runtime.tracing.merge import PARTS, merge_parts, parts_folder, read_profiles

TIMELINE = "HOROVOD_TIMELINE"
DYNAMIC = "DYNAMIC"
SHORTEST_US = 50.0
"""Of what is recorded besides steps: two lines of a trace cost more to draw than they tell."""
TIMEOUT_S = 600.0
ROUNDS = 8


@dataclass(frozen=True)
class Offset:
    """Offset from a rank's clock to that of rank 0."""

    microseconds: float = 0.0
    uncertainty: float = 0.0
    """The true offset is at most so many µs away."""


class Trace:
    """Records what this rank does into a file of its own, which `finish` merges with those of the others.

    The file is in Chrome's array format, whose last bracket may be missing: viewers open it after a crash, too.

    Args:
        config: what is recorded, and where the merged trace goes.
        environ: of the process: Horovod takes from it where its own records go.
    """

    def __init__(self, config: TraceConfig, environ: MutableMapping[str, str] = os.environ) -> None:
        self.config = config
        self._environ = environ
        self._folder = parts_folder(config.timeline)
        self._lock = threading.Lock()
        self._file: Any = None
        self._rows: dict[str, int] = {}
        """Rows of this rank's file, by name."""
        self._theirs = environ.get(TIMELINE)
        """Where the user has Horovod record, if at all."""
        self._horovod: Path | None = None
        self._place: Environment | None = None
        self._world = 1
        self._profiles: Path | None = None
        self._profiled = False
        self._shift = _wall_minus_monotonic()

    def now(self) -> int:
        """Return the time in ns, by a clock that never jumps: all ranks of a host have the same."""
        return time.monotonic_ns() + self._shift

    def prepare(self, environment: Environment, *, world: int = 1) -> None:
        """Let Horovod, which is about to start, record; it does so on rank 0 alone.

        Args:
            environment: this rank's place.
            world: number of this world of an elastic job, from 1.

        Raises:
            ConfigError: a rank to be profiled does not exist, or the file cannot be written.
        """
        beyond = [rank for rank in self.config.profile_ranks if rank >= environment.size]
        if beyond:
            raise ConfigError(
                f"{opt('profile_ranks')} names ranks of the job, of which there are {environment.size}, from 0. "
                f"Received: {beyond[0]}."
            )
        first = self._place is None
        self._place, self._world = environment, world
        try:
            if first and environment.rank == 0 and not environment.elastic:
                shutil.rmtree(self._folder, ignore_errors=True)  # of a job that died
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{opt('timeline', self.config.timeline)} cannot be written: {error.strerror}. Name another file."
            ) from error
        if self._theirs in (None, DYNAMIC):
            self._horovod = self._folder / f"horovod-{world}-{os.getpid()}.json"
            self._environ[TIMELINE] = str(self._horovod.absolute())
        else:
            self._horovod = Path(str(self._theirs))

    def begin(self, control: ControlChannel) -> None:
        """Compare the clocks, and begin the file of this world; every rank calls it."""
        assert self._place is not None, "prepared before"
        rank, host = self._place.rank, self._place.hostname
        everyone = gather(control, [self._world, host, _wall_minus_monotonic()], timeout=TIMEOUT_S)
        self._world = max(world for world, _, _ in everyone)  # a process that has joined counts from 1
        self._shift = next(shift for _, name, shift in everyone if name == host)  # that of the host's first rank
        offset = clock_offset(control, [name for _, name, _ in everyone], timeout=TIMEOUT_S, clock=self.now)
        self.close()
        header = {
            "name": f"rank {rank} ({host})",
            "rank": rank,
            "size": self._place.size,
            "host": host,
            "world": self._world,
            "process": os.getpid(),
            "offset_us": offset.microseconds,
            "uncertainty_us": offset.uncertainty,
            "horovod": None if rank or self._horovod is None else str(self._horovod.absolute()),
        }
        path = self._folder / f"rank-{self._world}-{rank}-{os.getpid()}{PARTS}"
        with self._lock:
            self._rows = {}
            self._file = path.open("w", encoding="utf-8", buffering=1)
            self._file.write("[\n")
            self._write({"name": "process_name", "ph": "M", "args": header})

    def record(self, name: str, begin_ns: int, end_ns: int, *, row: str = "training") -> None:
        """Record what this rank did from `begin_ns` to `end_ns`, by `now`."""
        self.record_event({"name": name, "ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000, "row": row})

    def record_event(self, event: dict[str, Any]) -> None:
        """Record an event with a name, a time and a duration in µs, and the row in which it is drawn."""
        kept = {name: value for name, value in event.items() if name != "row"}
        with self._lock, contextlib.suppress(OSError, ValueError):  # a full disk
            if self._file is None:
                return
            row = event["row"]
            if row not in self._rows:
                self._rows[row] = len(self._rows) + 1
                self._write({"name": "thread_name", "ph": "M", "tid": self._rows[row], "args": {"name": row}})
            self._write({**kept, "ph": "X", "tid": self._rows[row]})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps({**event, "pid": os.getpid()}) + ",\n")

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The first and the last step that are profiled on this rank; None where none is."""
        ranks = self.config.profile_ranks
        here = not ranks or (self._place is not None and self._place.rank in ranks)
        return self.config.steps if here else None

    def start_profile(self) -> None:
        """Start TensorFlow's profiler."""
        import tensorflow as tf

        if self._profiles is None:
            self._profiles = Path(tempfile.mkdtemp(prefix="hvdtrain-profile-"))
            tf.profiler.experimental.start(
                str(self._profiles), tf.profiler.experimental.ProfilerOptions(host_tracer_level=2)
            )

    def stop_profile(self) -> None:
        """Stop the profiler, if it runs, and record what it saw."""
        if self._profiles is None:
            return
        import tensorflow as tf

        folder, self._profiles, self._profiled = self._profiles, None, True
        tf.profiler.experimental.stop()
        moved = (self._shift - _wall_minus_monotonic()) / 1000
        for event in read_profiles(folder):
            self.record_event({**event, "ts": event["ts"] + moved})
        shutil.rmtree(folder, ignore_errors=True)

    def finish(self, control: ControlChannel) -> None:
        """Bring what all ranks have recorded to rank 0, which writes the trace; every rank calls it."""
        self.stop_profile()
        steps = self.profiled_steps
        if steps is not None and not self._profiled:
            LOGGER.warning(f"there was no step {steps[0]}: nothing was profiled.")
        self.close()
        mine = {
            path.name: path.read_text(encoding="utf-8") for path in self._folder.glob(f"rank-*-{os.getpid()}{PARTS}")
        }
        everyone = gather(control, mine, timeout=TIMEOUT_S)
        if control.rank == 0:
            for theirs in everyone:
                for name, text in theirs.items():
                    (self._folder / Path(name).name).write_text(text, encoding="utf-8")
            for rank, overlap in merge_parts(self.config.timeline).items():
                LOGGER.info(f"{rank}: {overlap}")
            LOGGER.info(f"the trace of all ranks is in {self.config.timeline}: open it at https://ui.perfetto.dev")
        control.barrier(TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """End the file of this world."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None


class TracedActivity(Activity):
    """An activity that records each phase, and profiles the steps that were asked for."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._phase: Phase = ""
        self._since = trace.now()
        self.step = None  # it is asked for as soon as there is a phase
        super().__init__()

    @property
    def phase(self) -> Phase:
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        now = self._trace.now()
        before, self._phase = self._phase, phase
        begin, self._since = self._since, now
        in_step = before in ("step", "compiling")
        if before and (in_step or now - begin >= SHORTEST_US * 1000):
            name = f"step {self.step}" + (" (compiles)" if before == "compiling" else "") if in_step else before
            self._trace.record(name, begin, now)
        steps = self._trace.profiled_steps
        if steps is None or self.step is None:
            return
        if phase in ("step", "compiling") and self.step == steps[0]:
            self._trace.start_profile()
        elif in_step and self.step == steps[1]:
            self._trace.stop_profile()
        else:
            return
        begin, self._since = self._since, self._trace.now()
        self._trace.record("profiler", begin, self._since)


@contextlib.contextmanager
def traced_step(trace: Trace | None, number: int) -> Iterator[None]:
    """Record the step `number` of a script's own loop; without a trace, do nothing."""
    if trace is None:
        yield
        return
    steps = trace.profiled_steps
    if steps is not None and number == steps[0]:
        trace.start_profile()
    begin = trace.now()
    try:
        yield
    finally:
        trace.record(f"step {number}", begin, trace.now())
        if steps is not None and number == steps[1]:
            trace.stop_profile()


def _wall_minus_monotonic() -> int:
    return time.time_ns() - time.monotonic_ns()


def clock_offset(
    control: ControlChannel, hosts: Sequence[str], *, timeout: float, clock: Callable[[], int] = time.time_ns
) -> Offset:
    """Return how far this rank's clock is behind that of rank 0. Collective.

    Ranks of one host have one clock. Others enter one exchange after the other: rank 0 reads its clock between two of
    them, after the part of this rank to the first has come, and before its own to the second is here.

    Args:
        hosts: host name of each rank.
        clock: tells the time in ns.
    """
    if len(set(hosts)) == 1:
        return Offset()
    readings, before = [], clock()
    control.exchange(b"", timeout=timeout)
    for _ in range(ROUNDS):
        entered = clock()
        roots = gather(control, clock(), timeout=timeout)
        readings.append((before, clock(), roots[0]))
        before = entered
    return Offset() if hosts[control.rank] == hosts[0] else offset_of(readings)


def offset_of(readings: Sequence[tuple[int, int, int]]) -> Offset:
    """Return the offset that fits all readings and is nearest to 0: clocks that may agree are taken to agree.

    Args:
        readings: this rank's clock before and after that of rank 0 was read, and what rank 0 read, in ns.
    """
    least = max(root - after for _, after, root in readings) / 1000
    most = min(root - before for before, _, root in readings) / 1000
    offset = min(max(0.0, least), most)
    return Offset(offset, max(most - offset, offset - least))
