"""Processes that play rounds and cells, several at a time."""

import contextlib
import multiprocessing
import multiprocessing.pool
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.places import NotPossible
from tests.chaos.play import Outcome, play
from tests.chaos.references import References
from tests.chaos.rounds import Round


@contextlib.contextmanager
def pool(jobs: int) -> Iterator[multiprocessing.pool.Pool]:
    """Context with so many processes; where it is left early, they end their jobs, namespaces and mounts."""
    with multiprocessing.get_context("spawn").Pool(jobs, leave_at_sigterm) as players:
        yield players
        players.close()  # a process that waits for work may not hear of SIGTERM
        players.join()


def leave_at_sigterm() -> None:
    """Have SIGTERM end this process by way of its contexts."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))


def played(of: Round, folder: Path) -> tuple[Round, Outcome | str]:
    """Return what became of a round, or why it was not played."""
    try:
        return of, play(of, References(folder), folder / f"{of.seed}-{of.fault}-{of.world.replace(':', '-')}")
    except NotPossible as why:
        return of, str(why)
