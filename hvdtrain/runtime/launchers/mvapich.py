"""MVAPICH2's own launcher."""

from collections.abc import Mapping

from hvdtrain.runtime.launchers.environment import Environment, number, place


class Mvapich:
    """``mpirun_rsh`` of MVAPICH2, and its ``mpiexec``, which sets PMI's variables besides."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`."""
        if "MV2_COMM_WORLD_RANK" not in environ:
            return None
        return place(
            launcher="mpiexec" if "PMI_RANK" in environ and "MPIRUN_RANK" not in environ else "mpirun_rsh",
            controller="mpi",
            world=(number(environ, "MV2_COMM_WORLD_RANK"), number(environ, "MV2_COMM_WORLD_SIZE")),
            local=(number(environ, "MV2_COMM_WORLD_LOCAL_RANK"), number(environ, "MV2_COMM_WORLD_LOCAL_SIZE")),
            job_id=environ.get("MPIRUN_ID") or environ.get("PMI_JOBID") or "mpirun_rsh",
        )
