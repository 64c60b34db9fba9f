"""The control channel: how ranks talk to one another outside the collectives.

It is up before any TensorFlow operation and needs neither TensorFlow nor Horovod, so that it still works
while collectives hang: agreement at the start, failure reports, the end of the job. Messages are small
(settings, tracebacks), they pass through rank 0, and no tensor travels here.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NoReturn, Protocol

from hvdtrain.runtime.launchers import Environment


class ControlChannel(Protocol):
    """Messages between the ranks of one job.

    `failures` and `report_failure` may be called from any thread, also while another one is in `exchange`.
    Exchanges and barriers must come in the same order on every rank.
    """

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def exchange(self, payload: bytes, *, timeout: float) -> list[bytes]:
        """Give ``payload`` to every rank and return what each gave, in rank order.

        Raises:
            LaunchError: a rank did not come within ``timeout`` seconds (it is named), or a message was not
                signed with the job's secret (its sender is named). The channel is of no further use then,
                except for failures and the end.
        """

    def barrier(self, timeout: float) -> None:
        """Wait until every rank is here, as `exchange` does."""

    def report_failure(self, text: str) -> None:
        """Tell all other ranks why this one fails; takes at most about two seconds and never raises."""

    def failures(self) -> dict[int, str]:
        """Return what other ranks have reported so far, by rank; does not wait and never raises."""

    def abort(self, code: int) -> NoReturn:
        """End the whole job, as far as the launcher lets one process do that, with exit code ``code``."""

    def close(self) -> None:
        """Give back what the channel holds; does not wait for the other ranks. Closing twice is fine."""


class LocalChannel:
    """The channel of a process that is alone."""

    rank = 0
    size = 1

    def exchange(self, payload: bytes, *, timeout: float) -> list[bytes]:
        """Return the payload: there is nobody else."""
        return [payload]

    def barrier(self, timeout: float) -> None:
        """Return: everybody is here."""

    def report_failure(self, text: str) -> None:
        """Do nothing: there is nobody to tell."""

    def failures(self) -> dict[int, str]:
        """Return no failures: nobody else can fail."""
        return {}

    def abort(self, code: int) -> NoReturn:
        """End this process."""
        end_process(code)

    def close(self) -> None:
        """Do nothing: nothing is held."""


def open_control(
    environment: Environment, *, timeout: float, environ: Mapping[str, str] = os.environ
) -> ControlChannel:
    """Open the control channel of this job; every rank must call it.

    Under an MPI launch this initialises MPI (with MPI_THREAD_MULTIPLE), which Horovod then shares. If it
    raises, leave by `end_process`: a plain exit would wait for the missing ranks in MPI_Finalize.

    Args:
        environment: this process's place, from `detect_environment`.
        timeout: seconds to wait for the other ranks.
        environ: environment variables (the job's secret, the address of Horovod's store).

    Raises:
        LaunchError: ranks are missing (they are named), their secrets differ, or mpi4py does not fit.
    """
    if environment.size == 1 or environment.controller == "none":
        return LocalChannel()
    # The loser is not imported: mpi4py would initialise MPI.
    if environment.controller == "mpi":
        from hvdtrain.runtime.control.mpi import open_mpi

        return open_mpi(environment, timeout=timeout, environ=environ)
    from hvdtrain.runtime.control.store import open_store

    return open_store(environment, timeout=timeout, environ=environ)


def end_process(code: int) -> NoReturn:
    """End this process at once with exit code ``code``, from any thread and without waiting for any other."""
    flush_output()
    os._exit(code)


def flush_output() -> None:
    """Write out what was printed so far, if it can still be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # a closed pipe, a closed file, no stream at all
            continue


def name_ranks(ranks: Iterable[int], most: int = 8) -> str:
    """Return "rank 3" or "ranks 0-2, 5, 9 and 12 more" with at most ``most`` pieces."""
    ordered = sorted(set(ranks))
    starts = [r for before, r in pairwise([-2, *ordered]) if r != before + 1]
    ends = [r for r, after in pairwise([*ordered, sys.maxsize]) if after != r + 1]
    pieces = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    left = sum(b - a + 1 for a, b in zip(starts[most:], ends[most:], strict=True))
    text = ", ".join(pieces[:most]) + (f" and {left} more" if left else "")
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {text}"
