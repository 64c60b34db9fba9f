"""IBM's launcher on LSF clusters."""

from collections.abc import Mapping

from hvdtrain.runtime.launchers.environment import Environment, number, place


class Jsrun:
    """``jsrun`` of IBM's Job Step Manager. It sets Open MPI's variables as well, for IBM Spectrum MPI."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`."""
        if "JSM_NAMESPACE_RANK" not in environ:
            return None
        return place(
            launcher="jsrun",
            controller="mpi",
            world=(number(environ, "JSM_NAMESPACE_RANK"), number(environ, "JSM_NAMESPACE_SIZE")),
            local=(
                number(environ, "JSM_NAMESPACE_LOCAL_RANK"),
                number(environ, "JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
            ),
            job_id=environ.get("PMIX_NAMESPACE") or environ.get("LSB_JOBID") or "jsrun",
        )
