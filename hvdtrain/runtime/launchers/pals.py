"""The launcher of HPE Cray EX systems."""

from collections.abc import Mapping

from hvdtrain.runtime.launchers.environment import Environment, number, place
from hvdtrain.runtime.launchers.slurm import in_step


class CrayPals:
    """``mpiexec`` of Cray's Parallel Application Launch Service, with PBS or without a scheduler.

    On Cray systems with Slurm, ``srun`` sets the same variables; it is asked instead.
    """

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`."""
        if not {"PALS_RANKID", "PALS_LOCAL_RANKID"} <= environ.keys() or in_step(environ):
            return None
        return place(
            launcher="mpiexec",
            controller="mpi",
            world=(number(environ, "PALS_RANKID"), number(environ, "PMI_SIZE", "PALS_SIZE")),
            local=(number(environ, "PALS_LOCAL_RANKID"), number(environ, "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")),
            job_id=environ.get("PALS_APID") or "mpiexec",
        )
