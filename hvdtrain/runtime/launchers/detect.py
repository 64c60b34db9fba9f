"""The launchers in the order in which they are asked."""

import os
from collections.abc import Mapping

from hvdtrain.runtime.launchers.environment import Environment, Launcher
from hvdtrain.runtime.launchers.horovodrun import HorovodrunGloo
from hvdtrain.runtime.launchers.hydra import Hydra
from hvdtrain.runtime.launchers.nobody import Nobody
from hvdtrain.runtime.launchers.open_mpi import OpenMpi
from hvdtrain.runtime.launchers.slurm import Srun

LAUNCHERS: tuple[Launcher, ...] = (HorovodrunGloo(), OpenMpi(), Hydra(), Srun(), Nobody())
"""Asked in this order: a launcher inside a Slurm step also passes on the variables of that step."""


def detect_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Return the place of this process in its job.

    Raises:
        LaunchError: a variable of the launcher is missing or malformed (it and its value are named), or srun
            started several tasks without MPI.
    """
    found = (launcher.detect(environ) for launcher in LAUNCHERS)
    return next(environment for environment in found if environment is not None)
