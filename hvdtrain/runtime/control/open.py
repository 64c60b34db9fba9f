"""Opening the control channel over what the launcher offers."""

import os
from collections.abc import Callable, Mapping
from typing import NoReturn

from hvdtrain.runtime.control.channel import ControlChannel, OnWait, end_process, latest_post
from hvdtrain.runtime.launchers import Environment


class LocalChannel:
    """The channel of a process that is alone."""

    def __init__(self) -> None:
        self.rank, self.size, self.unanswered_s = 0, 1, 0.0
        self.while_waiting: Callable[[], None] = lambda: None
        """Never called: there is nobody to wait for."""
        self._posted: dict[str, bytes] = {}

    def exchange(self, payload: bytes, *, timeout: float) -> list[bytes]:
        return [payload]

    def barrier(self, timeout: float, *, on_wait: OnWait | None = None) -> None:
        """Return: everybody is here."""

    def post(self, key: str, value: bytes) -> None:
        self._posted.pop(key, None)
        if value:
            self._posted[key] = value

    def read(self, key: str) -> dict[int, bytes]:
        value = latest_post(self._posted, key)
        return {} if value is None else {0: value}

    def report_failure(self, text: str) -> None:
        """Do nothing: there is nobody to tell."""

    def failures(self) -> dict[int, str]:
        return {}

    def abort(self, code: int) -> NoReturn:
        end_process(code)

    def close(self) -> None:
        """Do nothing: nothing is held."""


def open_control(
    environment: Environment, *, timeout: float, environ: Mapping[str, str] = os.environ, generation: int = 0
) -> ControlChannel:
    """Open the control channel of this job; every rank must call it.

    Under an MPI launch this initialises MPI (with MPI_THREAD_MULTIPLE), which Horovod then shares. If it
    raises, leave by `end_process`: a plain exit would wait for the missing ranks in MPI_Finalize.

    Args:
        environment: this process's place, from `detect_environment`.
        timeout: seconds to wait for the other ranks.
        environ: environment variables (the job's secret, the address of Horovod's store).
        generation: how many times the job has formed anew; messages of another generation are not taken.

    Raises:
        LaunchError: ranks are missing (they are named), their secrets differ, or mpi4py does not fit.
    """
    if environment.size == 1 or environment.controller == "none":
        return LocalChannel()
    # The loser is not imported: mpi4py would initialise MPI.
    if environment.controller == "mpi":
        from hvdtrain.runtime.control.mpi import open_mpi

        return open_mpi(environment, timeout=timeout, environ=environ, generation=generation)
    from hvdtrain.runtime.control.store import open_store

    return open_store(environment, timeout=timeout, environ=environ, generation=generation)
