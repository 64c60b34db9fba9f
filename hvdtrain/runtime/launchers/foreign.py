"""Launchers whose processes could not find one another: refused, where each would train a model of its own."""

from collections.abc import Mapping

from hvdtrain.config.errors import LoneRanksError
from hvdtrain.runtime.launchers.environment import Environment, number


class Torchrun:
    """``torchrun``, ``accelerate launch``, Kubernetes operators for PyTorch, and others that set its variables."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`; returns None or raises `LoneRanksError`."""
        if not {"RANK", "WORLD_SIZE"} <= environ.keys() or not {"MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & environ.keys():
            return None
        rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
        if size < 2:
            return None
        raise LoneRanksError(
            f"torchrun and the like do not start Horovod's ranks: each of the {size} processes would train a model of "
            f"its own. Received: RANK={rank}, WORLD_SIZE={size}. Start them with: horovodrun -np {size} python -m "
            "hvdtrain …, or mpirun, or let python -m hvdtrain launch choose. If no launcher started this process, "
            "unset RANK and WORLD_SIZE, which it has inherited.",
            rank=rank,
        )


class UnsupportedLauncher:
    """Launchers that tell a process its number, and not, or not in a way that is read here, of how many."""

    _MARKS: tuple[tuple[str, str, str], ...] = (
        ("PMIX_RANK", "PMIX_NAMESPACE", "a PMIx launcher such as prun or prterun"),
        ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "flux run"),
        ("ALPS_APP_PE", "ALPS_APP_ID", "aprun"),
    )

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`; returns None or raises `LoneRanksError`."""
        for rank, other, launcher in self._MARKS:
            if {rank, other} <= environ.keys() and environ.get("FLUX_JOB_SIZE", "") != "1":
                raise LoneRanksError(
                    f"hvdtrain does not read the place of a rank from {launcher}: each process would train a model of "
                    f"its own. Received: {rank}={environ[rank]}, {other}={environ[other]}. Use mpirun or mpiexec of "
                    f"the same MPI, or horovodrun. If no launcher started this process, unset {rank}, which it has "
                    "inherited.",
                    rank=number(environ, rank),
                )
        return None
