"""Open MPI's launchers."""

from collections.abc import Mapping

from hvdtrain.runtime.launchers.environment import Environment, number, place


class OpenMpi:
    """Open MPI 4 and 5: ``mpirun``, or ``horovodrun`` where it uses MPI."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`."""
        if "OMPI_COMM_WORLD_RANK" not in environ:
            return None
        return place(
            launcher="horovodrun" if self._by_horovodrun(environ) else "mpirun",
            controller="mpi",
            world=(number(environ, "OMPI_COMM_WORLD_RANK"), number(environ, "OMPI_COMM_WORLD_SIZE")),
            local=(
                number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
                number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
            ),
            job_id=environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "mpirun",
        )

    @staticmethod
    def _by_horovodrun(environ: Mapping[str, str]) -> bool:
        """Horovodrun names the network cards to MPI and to NCCL alike; it leaves no plainer mark."""
        cards = environ.get("OMPI_MCA_btl_tcp_if_include")
        return bool(cards) and cards == environ.get("NCCL_SOCKET_IFNAME") and "OMPI_MCA_pml" in environ
