"""The launchers of MPICH and Intel MPI."""

from collections.abc import Mapping

from hvdtrain.runtime.launchers.environment import Environment, number, place
from hvdtrain.runtime.launchers.slurm import in_step


class Hydra:
    """MPICH and Intel MPI: ``mpiexec`` or ``mpirun`` by hydra, and process managers that speak its PMI."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`."""
        of_srun = in_step(environ) and "MPI_LOCALRANKID" not in environ
        if "PMI_RANK" not in environ or of_srun:
            return None
        return place(
            launcher="mpiexec",
            controller="mpi",
            world=(number(environ, "PMI_RANK"), number(environ, "PMI_SIZE")),
            local=(
                number(environ, "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
                number(environ, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
            ),
            job_id=environ.get("PMI_JOBID") or environ.get("SLURM_JOB_ID") or "mpiexec",
        )
