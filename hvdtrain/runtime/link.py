"""Connect a rank to the others before TensorFlow loads: channel, watchdog, reaction to failures."""

import contextlib
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvdtrain.compat.tensorflow import check_frames_and_threads
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.broken_links import BrokenLinkWatch, Place
from hvdtrain.runtime.consequences import is_consequence
from hvdtrain.runtime.control.channel import ControlChannel, end_process
from hvdtrain.runtime.elastic import Engine, HostsChangedError, Worlds, is_over
from hvdtrain.runtime.failures import FailFast, FailurePolicy
from hvdtrain.runtime.hang.position import HANG, show_own_stacks, show_stacks_on_quit
from hvdtrain.runtime.hang.progress import ProgressWatch
from hvdtrain.runtime.hang.signs import Activity
from hvdtrain.runtime.hang.watch import HangWatch
from hvdtrain.runtime.interfaces import hosts_by_address
from hvdtrain.runtime.launchers import Environment, detect_environment
from hvdtrain.runtime.logs import LOGGER, RankLog, set_up_logging
from hvdtrain.runtime.rendezvous import meet
from hvdtrain.runtime.stopping import StopAgreement, code_of
from hvdtrain.runtime.stragglers import StragglerWatch
from hvdtrain.runtime.survivors import LOOK_EVERY_S, Survivors
from hvdtrain.runtime.tracing.trace import Trace, TracedActivity
from hvdtrain.runtime.tuning import set_exchange_defaults

_LOOKS_A_SECOND = 500
"""Looks of all ranks together. On 2 cores the store of horovodrun answered 2,900 requests a second."""
_TRIES = 3
"""Looks in a row that may fail: the stacks that a watch reads are those of threads that run meanwhile."""


class Watch(Protocol):
    """Something else that the watchdog looks at."""

    @property
    def ends_job(self) -> bool:
        """Whether it is about to end the job."""

    def look(self, now: float) -> None:
        """Look once, at the time `now` in seconds."""


class Watchdog:
    """A thread that looks for failure reports of other ranks, about once a second.

    A rank that failed ends the job through the launcher. Where that does not reach this process, which may
    hang in a collective for ever, the policy decides what becomes of it. It does nothing in a job of one.
    """

    def __init__(self, control: ControlChannel, policy: FailurePolicy, *, interval: float = 1.0) -> None:
        """Watch ``control`` every ``interval`` seconds, less often in a job of many ranks."""
        self._control = control
        self._policy = policy
        self._interval = max(interval, control.size / _LOOKS_A_SECOND)
        self._watches: tuple[Watch, ...] = ()
        self._changing = threading.Lock()
        """Held while `_watches` is replaced, by this thread or by one that adds or stops."""
        self._failures: Counter[int] = Counter()
        """Looks that failed since one did not, by the watch's id."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvdtrain-watchdog", daemon=True)

    def start(self) -> None:
        """Start to watch; once only."""
        if self._control.size > 1:
            self._thread.start()

    def add(self, watch: Watch, *, interval: float = 1.0) -> None:
        """Look at this as well: at once, then at least every `interval` seconds where the job is small."""
        self._interval = min(self._interval, max(interval, self._control.size / _LOOKS_A_SECOND))
        # What it posts tells others of this rank before anything can go wrong.
        if self._thread.is_alive() and not self._look_at(watch):
            return
        with self._changing:
            self._watches = (*self._watches, watch)

    def stop(self) -> None:
        """Stop watching, so that the channel can be closed; fine to call twice, or before the start.

        The watches are given up: one may still hold a frame of the last read of data, and with it an iterator that runs
        Python code, whose end Python waits for in vain once it is ending itself.
        """
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            ends_job = any(watch.ends_job for watch in self._watches)
            self._thread.join(timeout=None if ends_job else 2.0)
        with self._changing:
            self._watches = ()

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            failed = self._control.failures()
            if failed:
                if any(text.startswith(HANG) for text in failed.values()):
                    show_own_stacks(self._control.rank)
                self._policy.others_failed(self._control, sorted(failed), self._stopped)
                return
            for watch in self._watches:
                if not self._look_at(watch):
                    with self._changing:
                        self._watches = tuple(each for each in self._watches if each is not watch)

    def _look_at(self, watch: Watch) -> bool:
        """Look once; return False if it fails again and again. That ends neither the job nor the watch for failures."""
        try:
            watch.look(time.monotonic())
        except Exception:
            self._failures[id(watch)] += 1
            if self._failures[id(watch)] < _TRIES:
                return True
            LOGGER.warning(f"{type(watch).__name__} watches no more:\n{traceback.format_exc()}")
            return False
        self._failures[id(watch)] = 0
        return True


INTERRUPTED = "interrupted"


@dataclass
class Link:
    """Connection of a rank to the others before TensorFlow loads."""

    environment: Environment
    control: ControlChannel
    watchdog: Watchdog
    policy: FailurePolicy = field(default_factory=FailFast)
    on_interrupt: Callable[[], str] = lambda: INTERRUPTED
    """Returns what the user is told at Ctrl-C; a run that can go on says how."""
    stopping: StopAgreement | None = None
    """While a training that saves is under way: signals ask it to stop."""
    trainings: int = 0
    """How many such trainings have begun."""
    stop_signal: int | None = None
    """The signal that asked one of them to stop."""
    worlds: Worlds | None = None
    """Of an elastic job: those that this process has been in, this one included."""
    survivors: Survivors = field(default_factory=Survivors)
    """`worlds` of a job over MPI; of other jobs, what does nothing."""
    engine: Engine | None = None
    """Horovod in a world of several ranks of an elastic job."""
    activity: Activity = field(default_factory=Activity)
    """What this rank does, which its watchdog shows the others."""
    trace: Trace | None = None
    """Where this rank records what it does, if it is asked to."""
    stragglers: StragglerWatch | None = None
    """Looks for a rank that is slower than the others, where Horovod trains."""
    threads: list[Callable[[], None]] = field(default_factory=list)
    """Stop threads that receive messages of other ranks."""
    log: RankLog = field(default_factory=RankLog)
    """The file to which this rank's messages go as well."""

    @property
    def job(self) -> str | None:
        """Name of an elastic job, the same in all of its worlds; None for others."""
        return None if self.worlds is None else self.worlds.job

    @property
    def communicator(self) -> Any:
        """That of mpi4py among all ranks, where it is not COMM_WORLD; else None."""
        return self.survivors.communicator

    @property
    def rejoined(self) -> bool:
        """Whether this process was in a world of the job before this one."""
        return self.worlds is not None and self.worlds.entered > 1

    def record_to(self, trace: Trace | None) -> None:
        """Record what this rank does; called before anything is watched."""
        self.trace = trace
        if trace is not None:
            self.activity = TracedActivity(trace)

    def watch_for_hangs(self, config: RuntimeConfig) -> None:
        """Have the watchdog look for a hang of the job, if there are other ranks."""
        if self.environment.size == 1 or not config.hang_timeout:
            return

        def end(text: str, show_stacks: Callable[[], None]) -> None:
            self.policy.hung(self.control, self.environment, text, show_stacks)

        check_frames_and_threads()
        show_stacks_on_quit()
        progress = ProgressWatch(self.activity, config.hang_timeout, config.load_timeout)
        hangs = HangWatch(
            self.control,
            progress,
            config.hang_timeout,
            end,
            host=self.environment.hostname,
            patience_with_silent=lambda: 0.0 if self.worlds is None else self.worlds.patience,
        )
        self.watchdog.add(hangs, interval=config.hang_timeout / 10)

    def watch_other_hosts(self, places: Sequence[Place], timeout: float) -> None:
        """Have the watchdog look for other hosts that cannot be reached any more.

        An elastic job goes on without them: its launcher finds out which ranks are lost.

        Args:
            places: of each rank.
            timeout: see `BrokenLinkWatch`; 0: none is looked for.
        """
        here = self.environment.hostname
        others = [rank for rank, place in enumerate(places) if place.host != here]
        if not others or not timeout or self.worlds is not None:
            return
        hosts = hosts_by_address({place.host: place.addresses for place in places})
        ranks = {host: [rank for rank in others if places[rank].host == host] for host in {*hosts.values()} - {here}}
        away = {address: host for address, host in hosts.items() if host != here}

        def end(text: str) -> None:
            self.policy.broken_link(self.control, self.environment, text)

        self.watchdog.add(BrokenLinkWatch(away, ranks, timeout, end), interval=timeout / 10)

    def watch_engine(self, engine: Engine) -> None:
        """Have the watchdog cut the connections of an engine that has stopped."""
        self.engine = engine
        self.watchdog.add(engine)

    def watch_for_stragglers(self) -> None:
        """Have the watchdog look for a rank that is slower than the others."""
        self.stragglers = StragglerWatch(self.control, self.activity, self.environment.hostname)
        self.watchdog.add(self.stragglers)

    def fail(self, error: BaseException) -> int:
        """Report this rank's failure to the job. Returns the exit code (only in single-process jobs)."""
        if self.stop_signal is not None and is_consequence(error):
            # Launchers ask to stop where another rank is gone: nobody is left to save with.
            if self.environment.rank == 0 and not self.control.failures():
                LOGGER.info(self.on_interrupt())
            end_process(code_of(self.stop_signal))
        return self.policy.fail(self.control, self.environment, error)

    def request_stop(self, number: int) -> bool:
        """Ask the training under way to save and stop, because of a signal; tell whether there is one."""
        if self.stopping is not None:
            self.stopping.request(number)
        return self.stopping is not None

    @contextlib.contextmanager
    def stoppable(
        self, begun: int, *, grace: float, ranks: int | None = None, trains: bool = True
    ) -> Iterator[StopAgreement]:
        """Let signals stop the training in this context after a step that is saved; every rank calls it.

        Args:
            begun: finished steps.
            grace: seconds from the signal until this process ends, saved or not.
            ranks: how many ranks train, from rank 0 on; None: all.
            trains: whether this rank does; one that serves others asks them to stop.
        """
        self.trainings += 1
        agreement = StopAgreement(self.control, str(self.trainings), begun, grace=grace, ranks=ranks, trains=trains)
        with agreement:
            self.stopping, self.stop_signal = agreement, None
            try:
                yield agreement
            finally:
                self.stopping, self.stop_signal = None, agreement.requested

    def leave_world(self, error: BaseException) -> bool:
        """Leave this world of an elastic job if `error` ends no more than that, and tell whether it does.

        A training that was asked to stop does so: there is no other world for it.
        """
        if self.worlds is None or self.stop_signal is not None or not is_over(error, self.control):
            return False
        if not self.worlds.can_leave:
            return False
        self.stop_threads()
        self.close()
        if self.engine is not None and not isinstance(error, HostsChangedError):
            self.engine.cut()
        self.worlds.leave()
        return True

    def stop_threads(self) -> None:
        """Stop threads that receive messages of other ranks."""
        for stop in self.threads:
            stop()
        self.threads.clear()

    def close(self) -> None:
        """Stop watching and release the channel."""
        self.watchdog.stop()
        self.control.close()


def open_control(
    environment: Environment,
    *,
    timeout: float,
    environ: Mapping[str, str] = os.environ,
    communicator: Any = None,
) -> ControlChannel:
    """Open the control channel of this job; every rank must call it.

    `communicator` is that of mpi4py among all ranks, where it is not COMM_WORLD.

    Under an MPI launch this initialises MPI (with MPI_THREAD_MULTIPLE), which Horovod then shares. If it
    raises, leave by `end_process`: a plain exit would wait for the missing ranks in MPI_Finalize.

    Raises:
        LaunchError: ranks are missing (they are named), their secrets differ, or mpi4py does not fit.
    """
    if environment.size == 1 or environment.controller == "none":
        return ControlChannel()
    # The loser is not imported: mpi4py would initialise MPI.
    if environment.controller == "mpi":
        from hvdtrain.runtime.control.mpi import open_mpi

        return open_mpi(environment, timeout=timeout, environ=environ, communicator=communicator)
    from hvdtrain.runtime.control.store import open_store

    return open_store(environment, timeout=timeout, environ=environ)


def open_link(
    *,
    timeout: float,
    policy: FailurePolicy | None = None,
    worlds: Worlds | None = None,
) -> Link:
    """Find out who started this process and reach the other ranks.

    Args:
        policy: what follows from the failure of a rank; by default the end of the job.
        worlds: of an elastic job: those that this process has been in before; None: none.

    Raises:
        LaunchError: ranks are missing, or cannot be reached.
    """
    started = detect_environment(os.environ)
    set_exchange_defaults(os.environ, elastic=started.elastic)
    if started.elastic:
        worlds = worlds or (Survivors() if started.controller == "mpi" else Worlds())
        worlds.enter(timeout)
    survivors = worlds if isinstance(worlds, Survivors) else Survivors()
    meeting = meet(os.environ, timeout)
    environment = detect_environment(os.environ)
    set_up_logging(environment.rank)
    control = open_control(
        environment,
        timeout=meeting.timeout if meeting else timeout,
        communicator=survivors.communicator,
    )
    if meeting is not None:
        meeting.complete()
    policy = policy or FailFast()
    watchdog = Watchdog(control, policy)
    watchdog.start()
    if survivors is worlds:
        survivors.meet(control, environment, lambda text: policy.broken_link(control, environment, text))
        watchdog.add(survivors, interval=LOOK_EVERY_S)
    return Link(
        environment=environment, control=control, watchdog=watchdog, policy=policy, worlds=worlds, survivors=survivors
    )
