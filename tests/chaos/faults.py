"""The faults of a round, and what a job has to do about each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """What may be done to one rank, or to what it needs."""

    codes: tuple[int, ...]
    """Exit codes of the job, one of which it has to end with."""
    names: str
    """Pattern of the first line that tells the user what happened; {rank} is the one that was struck, {step} where."""
    within_s: float = 30.0
    """The job has ended so many seconds after the fault, unless it goes on."""
    forms: tuple[str, ...] = ("command", "script")
    """The trainings that it may strike: see `tests.chaos.trainings`."""


_BY_MPIRUN = r"process rank {rank} with PID|Process name: \[\[\d+,\d+\],{rank}\]"
BY_LAUNCHER = _BY_MPIRUN + "|rank {rank} was the first to end, with exit code"
"""What mpirun says of a rank that was killed, or ended with a code of its own, and horovodrun of either."""
_HANGS = r"The job hangs"
_FAILED = r"rank {rank} \(\S+\) failed"
_EXITED = r"called sys\.exit\(3\).*\[rank {rank} \(|called sys\.exit\(3\)"
_STOPPED = "SIGTERM: all ranks stop after step"

FIXED = {
    "SIGKILL": Fault((137,), BY_LAUNCHER),
    "SIGSEGV": Fault((139,), BY_LAUNCHER),
    "SIGTERM": Fault((75,), _STOPPED),
    "SIGSTOP": Fault((124,), _HANGS, within_s=60.0),
    "exception": Fault((1,), _FAILED, forms=("script",)),
    "sys.exit": Fault((3,), _EXITED, forms=("script",)),
    "os._exit": Fault((3,), BY_LAUNCHER, forms=("script",)),
    "inf": Fault((2,), "The loss became NaN or infinite", forms=("script",)),
    "inf-skip": Fault((0,), r"warning: step {step} \(.*is skipped: .* of rank {rank}", forms=("skip",)),
    "inf-rollback": Fault((0,), "warning: rolled back after step", forms=("rollback",)),
    "corrupt": Fault((137,), BY_LAUNCHER),
    "disk-full": Fault((0, 2), "No space left on device"),
}
"""By name, of jobs with a fixed number of ranks. corrupt: killed, and its newest checkpoint damaged."""

_GOES_ON = r"elastic: 2 ranks before, {now} now: goes on after step"
_LOST = Fault((0,), _GOES_ON.format(now=r"\d"), forms=("elastic",))

ELASTIC = {
    "SIGKILL": _LOST,
    "SIGSEGV": _LOST,
    "os._exit": _LOST,
    "host-added": Fault((0,), _GOES_ON.format(now=3), forms=("elastic",)),
    "host-removed": Fault((0,), _GOES_ON.format(now=1), forms=("elastic",)),
    "exception": Fault((1,), _FAILED, forms=("elastic",)),
    "sys.exit": Fault((3,), _EXITED, forms=("elastic",)),
    "SIGTERM": Fault((75,), _STOPPED, forms=("elastic",)),
    "SIGSTOP": _LOST,
}
"""By name, of elastic jobs: a rank that is lost, or stopped, ends none."""

NAMES = tuple(dict.fromkeys([*FIXED, *ELASTIC]))


def faults_of(world: str) -> dict[str, Fault]:
    """Return the faults that may strike a world."""
    return ELASTIC if world.startswith("elastic") else FIXED
