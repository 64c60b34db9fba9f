"""Engines whose collectives are compared, by name. No TensorFlow."""

from dataclasses import dataclass

from hvdtrain.bench.bandwidth import ADD, COLLECTIVES
from hvdtrain.bench.sides import Launcher
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.registry import suggestion


@dataclass(frozen=True)
class Engine:
    """An implementation of collectives."""

    about: str
    launcher: Launcher
    code: str
    """module:attribute of the function that opens it in each process."""
    collectives: tuple[str, ...] = COLLECTIVES


ENGINES = {
    "horovod-mpi": Engine("Horovod over MPI, called eagerly", "mpirun", "hvdtrain.bench.horovod_calls:open_engine"),
    "horovod-gloo": Engine("Horovod over Gloo, called eagerly", "gloo", "hvdtrain.bench.horovod_calls:open_engine"),
    "tf-ring": Engine(
        "TensorFlow's own collectives, gRPC ring, in compiled functions",
        "mpirun",
        "hvdtrain.bench.tensorflow_calls:open_engine",
        # A failing collective aborts all later ones: the one missing on CPUs comes last (TensorFlow 2.21).
        ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"),
    ),
    "mpi4py": Engine("MPI, called by mpi4py on NumPy arrays", "mpirun", "hvdtrain.bench.mpi_calls:open_engine"),
    "memory": Engine(
        "NumPy adds two arrays on every rank at once: no collective, but what memory allows",
        "mpirun",
        "hvdtrain.bench.memory_calls:open_engine",
        (ADD,),
    ),
}


def engine(name: str) -> Engine:
    """Return the engine `name`.

    Raises:
        ConfigError: unknown name; suggests the nearest.
    """
    if name not in ENGINES:
        raise ConfigError(f"bench has no engine {name!r}.{suggestion(name, dict.fromkeys(ENGINES, ''))}")
    return ENGINES[name]
