"""The sides of a comparison, by name: how each is launched, and its limits. No TensorFlow."""

from dataclasses import dataclass
from typing import Literal

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.registry import suggestion

Launcher = Literal["mpirun", "gloo", "none"]
Traffic = Literal["ring", "server", "none"]

IDEAL = "one-core"


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    about: str
    launcher: Launcher
    """Launcher of its processes; none: a single process."""
    backend: str | None = None
    """Value of `--backend`; None for a hand-written loop."""
    several: bool = False
    """Whether a single process holds several replicas (`--replicas`)."""
    traffic: Traffic = "none"
    """How gradients travel between processes: see `wire`."""

    @property
    def by_hand(self) -> bool:
        """Whether it is a hand-written loop, without hvdtrain."""
        return self.backend is None

    def processes(self, ranks: int) -> int:
        """Return the number of processes for `ranks` replicas, including a chief and a parameter server."""
        if self.traffic == "server":
            return ranks + 2
        return 1 if self.launcher == "none" else ranks

    def share(self, batch: int, ranks: int) -> int:
        """Return the samples per replica and step; with asynchronous sides, one worker takes the whole batch."""
        return batch if self.traffic == "server" else batch // ranks


SIDES = {
    "horovod-mpi": Side("hvdtrain on Horovod over MPI", "mpirun", "horovod", traffic="ring"),
    "horovod-gloo": Side("hvdtrain on Horovod over Gloo", "gloo", "horovod", traffic="ring"),
    "plain-mpi": Side("hand-written loop, Horovod at its own settings over MPI", "mpirun", traffic="ring"),
    "plain-gloo": Side("hand-written loop, Horovod at its own settings over Gloo", "gloo", traffic="ring"),
    IDEAL: Side("hand-written loop without Horovod, one process on one rank's cores: the ideal", "none"),
    "single": Side("hvdtrain in one process, without Horovod", "none", "single"),
    "one_device": Side("hvdtrain on tf.distribute's OneDeviceStrategy", "none", "one_device"),
    "mirrored": Side("hvdtrain on tf.distribute's MirroredStrategy", "none", "mirrored", several=True),
    "central_storage": Side(
        "hvdtrain on tf.distribute's CentralStorageStrategy", "none", "central_storage", several=True
    ),
    "multi_worker_mirrored": Side(
        "hvdtrain on tf.distribute's MultiWorkerMirroredStrategy", "mpirun", "multi_worker_mirrored", traffic="ring"
    ),
    "parameter_server": Side(
        "hvdtrain on tf.distribute's ParameterServerStrategy: each rank a worker, a chief and a server beside them",
        "mpirun",
        "parameter_server",
        traffic="server",
    ),
}
USUAL = ("horovod-mpi", "horovod-gloo", "plain-mpi", "plain-gloo", "mirrored", "multi_worker_mirrored")


def side(name: str) -> Side:
    """Return the side `name`.

    Raises:
        ConfigError: unknown name; suggests the nearest.
    """
    if name not in SIDES:
        raise ConfigError(f"bench has no backend {name!r}.{suggestion(name, dict.fromkeys(SIDES, ''))}")
    return SIDES[name]


def refusal(name: str, *, ranks: int, precision: str, accumulate: int) -> str | None:
    """Return why this side cannot run with these settings; None if it can be tried."""
    this = side(name)
    if this.launcher == "none" and not this.several and ranks > 1:
        return "it is one replica"
    if this.by_hand and precision == "mixed_float16":
        return "the hand-written loop has no loss scaling"
    if this.by_hand and accumulate > 1:
        return (
            "the hand-written loop has no accumulation: Horovod's is part of its optimizer, which does not work with "
            "Keras 3"
        )
    return None
