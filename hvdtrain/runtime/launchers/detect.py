"""The launchers in the order in which they are asked."""

import os
from collections.abc import Mapping

from hvdtrain.runtime.launchers.environment import Environment, Launcher
from hvdtrain.runtime.launchers.foreign import Torchrun, UnsupportedLauncher
from hvdtrain.runtime.launchers.horovodrun import HorovodrunGloo
from hvdtrain.runtime.launchers.hydra import Hydra
from hvdtrain.runtime.launchers.inherited import refuse_ended_launcher
from hvdtrain.runtime.launchers.jsrun import Jsrun
from hvdtrain.runtime.launchers.kubernetes import IndexedJob
from hvdtrain.runtime.launchers.mvapich import Mvapich
from hvdtrain.runtime.launchers.nobody import Nobody
from hvdtrain.runtime.launchers.open_mpi import OpenMpi
from hvdtrain.runtime.launchers.pals import CrayPals
from hvdtrain.runtime.launchers.slurm import Srun

LAUNCHERS: tuple[Launcher, ...] = (
    HorovodrunGloo(),
    Jsrun(),  # before Open MPI, whose variables it sets as well
    OpenMpi(),
    CrayPals(),  # these two before hydra: they set variables of PMI as well
    Mvapich(),
    Hydra(),
    Srun(),
    Torchrun(),
    UnsupportedLauncher(),
    IndexedJob(),  # after all that may run within its pods
    Nobody(),
)
"""Asked in this order: a launcher inside a Slurm step also passes on the variables of that step."""


def detect_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Return the place of this process in its job.

    Raises:
        LaunchError: a variable of the launcher is missing or malformed (it and its value are named).
        LoneRanksError: several processes were started that could not find one another: by srun or in a Kubernetes Job
            without MPI and without a secret, or by a launcher that Horovod does not work with. Or this process has
            inherited the variables of a job that has ended.
    """
    refuse_ended_launcher(environ)
    found = (launcher.detect(environ) for launcher in LAUNCHERS)
    return next(environment for environment in found if environment is not None)
