"""Opening the control channel over what the launcher offers."""

import os
from collections.abc import Mapping

from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.control.local import LocalChannel
from hvdtrain.runtime.launchers import Environment


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
