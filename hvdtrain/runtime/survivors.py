"""Go on over MPI without ranks that are lost: worlds of those that are left, in the same processes.

Open MPI's mpirun ends a job of which a rank is lost, unless it is started with `--enable-recovery`. Then nobody tells
the other ranks: messages to a lost rank never arrive, and a collective waits for it for ever. So the ranks of each host
look whether the processes of the others live, and tell other hosts; one that is alone on its host gives signs of life.
Horovod's engine, which exchanges with all ranks all the time, is stopped while ranks train apart, and started where
they meet (2 ms). A rank that is lost meanwhile leaves the others able to form a world of their own; one that is lost at
a meeting ends the job.
"""

import atexit
import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from typing import Any

import psutil

from hvdtrain.config.errors import LaunchError, MissingRankError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.channel import ControlChannel, end_process, gather, name_ranks
from hvdtrain.runtime.control.mpi import MpiTransport, load_mpi
from hvdtrain.runtime.elastic import Worlds
from hvdtrain.runtime.failures import EXIT_FAILURE
from hvdtrain.runtime.hang.watch import pid_space
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.logs import LOGGER

LOST = "lost"
"""Key on the board: the ranks whose processes a rank no longer finds on its host."""
ALIVE = "alive"
"""Key on the board: a count that a rank increases which is alone on its host."""
LOOK_EVERY_S = 0.2
BEAT_S, SILENCE_S = 5.0, 60.0
"""Between two signs of life, and until a rank counts as lost that gives none, as in elastic jobs over Gloo."""
_STALL_S = 10.0
"""Without a look for so long, this process stood still itself: it then knows nothing of others."""
_GRACE_S = 2.0
"""A rank whose process ends may have left in order, and another may be about to leave this world."""
_PAUSE_S = 0.01


class Survivors(Worlds):
    """The worlds of a job over MPI that this process takes part in. No rank joins one.

    It is one of the watchdog's watches. Ranks are numbered here as the launcher has numbered them, whatever the world.
    """

    def __init__(self, environ: Any = os.environ) -> None:
        super().__init__(environ)
        self.communicator: Any = None
        """Of mpi4py, among the ranks of this world; None: all ranks of the job."""
        self.lost: set[int] = set()
        """Ranks of the job whose processes are gone."""
        self._engine_runs = True
        self._members: list[int] = []
        """The ranks of this world."""
        self._hosts: list[str] = []
        self._places: list[str] = []
        """Of each rank of the job: ranks of one place see one another's processes."""
        self._processes: dict[int, psutil.Process] = {}
        """Of this host's other ranks."""
        self._me = 0
        """This rank."""
        self._mpi: Any = None
        self._lobby: MpiTransport | None = None
        """Messages among ranks of the job, by which those that are left find one another."""
        self._control = ControlChannel()
        self._end: Callable[[str], None] = lambda text: None
        self._since: float | None = None
        self._beats, self._beat, self._looked = 0, -math.inf, -math.inf
        self._heard: dict[int, tuple[bytes, float]] = {}
        """The last sign of life of each rank that is alone on its host, and when it came."""

    # -- worlds --

    def enter(self, start_timeout: float) -> None:
        """Form a world with the ranks that are left."""
        if self.entered:
            left = self._agreed(RuntimeConfig.load_timeout)
            if self._me == left[0]:
                LOGGER.warning(f"{self._names()} lost: the process has ended. The job goes on without it.")
            self._members = left
            group = self._mpi.COMM_WORLD.Get_group().Incl(self._members)
            self.communicator = self._mpi.COMM_WORLD.Create_group(group, self.entered)
            self._write_place()
        self.entered += 1

    def meet(self, control: ControlChannel, environment: Environment, end: Callable[[str], None]) -> None:
        """Begin to look after the ranks of this world, which has just opened its channel. Collective.

        Args:
            end: ends the job, with a message.
        """
        if self.entered == 1:
            here = [environment.hostname, pid_space()]
            told = gather(control, [*here, os.getpid()], timeout=RuntimeConfig.load_timeout)
            self._me, self._members = environment.rank, list(range(environment.size))
            self._hosts = [host for host, *_ in told]
            self._places = [f"{host} {space}" for host, space, _ in told]
            self._mpi = load_mpi(environment)
            self._lobby = MpiTransport(self._mpi, self._mpi.COMM_WORLD.Dup())
            for rank, (*place, process) in enumerate(told):
                if place == here and rank != self._me:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        self._processes[rank] = psutil.Process(process)
        self._control, self._end, self._since, self._engine_runs = control, end, None, True
        self._heard, self._looked = {}, -math.inf
        control.while_waiting = self.check

    def leave(self) -> None:
        """Leave this world, in which Horovod does not run; see `can_leave`."""

    @property
    def can_leave(self) -> bool:
        """Whether another world can follow: Horovod, where it runs, waits for the lost rank."""
        return not self._engine_runs

    @property
    def patience(self) -> float:
        """No silent rank is given up: its process may live."""
        return 0.0

    @property
    def job(self) -> str:
        """Name of the job, the same in all of its worlds."""
        return self._environ.get("OMPI_MCA_ess_base_jobid", "mpirun")

    def _agreed(self, timeout: float) -> list[int]:
        """Return the ranks that are left, once all of them say that the same ones are lost."""
        assert self._lobby is not None  # the first world has met
        deadline = time.monotonic() + timeout
        said: set[int] | None = None
        heard: dict[int, set[int]] = {}
        while True:
            self.lost |= self._gone_here()
            for rank, text in self._lobby.arrived(self.entered):
                heard[rank] = set(json.loads(text))
                self.lost |= heard[rank]
            left = [rank for rank in self._members if rank not in self.lost]
            if said != self.lost:
                said = set(self.lost)
                self._lobby.publish(self.entered, json.dumps(sorted(said)).encode(), [r for r in left if r != self._me])
            missing = [rank for rank in left if rank != self._me and heard.get(rank) != said]
            if not missing:
                return left
            if time.monotonic() > deadline:
                raise LaunchError(f"No message from {name_ranks(missing)} within {timeout:g} s, after a rank was lost.")
            time.sleep(_PAUSE_S)

    def _write_place(self) -> None:
        """Write this process's place in the world to the environment, where `detect_environment` finds it."""
        here = [rank for rank in self._members if self._hosts[rank] == self._hosts[self._me]]
        place = {
            **{"RANK": self._members.index(self._me), "SIZE": len(self._members)},
            **{"LOCAL_RANK": here.index(self._me), "LOCAL_SIZE": len(here)},
        }
        self._environ.update({f"OMPI_COMM_WORLD_{name}": str(number) for name, number in place.items()})

    # -- losses --

    ends_job = False

    def look(self, now: float) -> None:
        """Look whether ranks are lost, and end the job where it cannot go on without them; see `Watch`."""
        if self.over or len(self._members) == 1:
            return
        gone = (self._gone_here() | self._silent(now)) - self.lost
        if gone:
            self.lost |= gone
            self._control.post(LOST, json.dumps(sorted(self.lost)).encode())
        for text in self._control.read(LOST).values():
            self.lost |= set(json.loads(text))
        if self._me in self.lost:
            LOGGER.warning(
                f"rank {self._me} gave no sign of life for {SILENCE_S:g} s, and the others went on without it."
            )
            end_process(EXIT_FAILURE)  # alone: an abort would end them, too
        if not self._lost_here():
            return
        self._since = now if self._since is None else self._since
        if (self._engine_runs or not self.training) and now - self._since > _GRACE_S:
            why = "while all ranks waited for one another" if self.training else "and the job needs all of its ranks"
            self._end(f"{self._names()} lost, {why}. Started again, a run goes on with --resume auto.")

    def _silent(self, now: float) -> set[int]:
        """Give a sign of life, and return the ranks that are alone on their hosts and have given none for long."""
        alone = {rank for rank in self._members if self._places.count(self._places[rank]) == 1}
        if self._me in alone and now - self._beat >= BEAT_S:
            self._beat, self._beats = now, self._beats + 1
            self._control.post(ALIVE, str(self._beats).encode())
        came = {self._members[rank]: count for rank, count in self._control.read(ALIVE).items()}
        stood_still, self._looked = now - self._looked > _STALL_S, now
        for rank in alone - {self._me}:
            count, since = self._heard.get(rank, (b"", now))
            anew = stood_still or came.get(rank, count) != count
            self._heard[rank] = came.get(rank, count), now if anew else since
        if self._engine_runs or not self.training:
            return set()  # it may be busy in C code, and others wait for it in any case
        return {rank for rank, (_, since) in self._heard.items() if now - since > SILENCE_S}

    def check(self) -> None:
        """Raise MissingRankError once a rank of this world is lost."""
        if self.training and not self._engine_runs and self._lost_here():
            raise MissingRankError(f"{self._names()} lost: the process has ended.")

    def _lost_here(self) -> list[int]:
        return [rank for rank in self._members if rank in self.lost]

    def _names(self) -> str:
        lost = self._lost_here()
        hosts = ", ".join(dict.fromkeys(self._hosts[rank] for rank in lost))
        return f"{name_ranks(lost)} ({hosts}) {'is' if len(lost) == 1 else 'are'}"

    def _gone_here(self) -> set[int]:
        return {rank for rank, process in self._processes.items() if _has_ended(process)}

    # -- Horovod --

    def part(self) -> None:
        """Stop Horovod, once all ranks are here: from now on they train apart. Collective."""
        import horovod.tensorflow as hvd

        if self.training and self._engine_runs:
            self._control.barrier(math.inf)
            hvd.shutdown()
            self._engine_runs = False

    def gather_again(self) -> None:
        """Start Horovod again, once all ranks are here. Collective.

        Raises:
            MissingRankError: one is lost.
        """
        import horovod.tensorflow as hvd

        if not self._engine_runs:
            self._control.barrier(math.inf)
            atexit.unregister(hvd.shutdown)  # each start registers it once more
            self._engine_runs = True
            hvd.init(comm=self.communicator)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
