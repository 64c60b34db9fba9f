"""Horovod's modules, their counterparts in `hvdtrain.horovod`, and the names in both."""

from collections.abc import Sequence

from hvdtrain.cli.script.packages import Place, lookup, members_of, module_file

MODULES = (
    "horovod.tensorflow",
    "horovod.tensorflow.compression",
    "horovod.tensorflow.data",
    "horovod.tensorflow.data.compute_service",
    "horovod.tensorflow.data.compute_worker",
    "horovod.tensorflow.elastic",
    "horovod.tensorflow.functions",
    "horovod.tensorflow.gradient_aggregation",
    "horovod.tensorflow.gradient_aggregation_eager",
    "horovod.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic",
    "horovod.tensorflow.mpi_ops",
    "horovod.tensorflow.sync_batch_norm",
    "horovod.tensorflow.util",
    "horovod.keras",
    "horovod.keras.callbacks",
    "horovod.keras.elastic",
)
"""Modules of Horovod 0.28.1 for TensorFlow and Keras."""

FACE = "hvdtrain.horovod"
WITH_OWN_KERAS = ("horovod.spark.keras", "horovod.spark.tensorflow", "horovod._keras")
"""Parts that use plain Horovod on the script's Keras, and have no counterpart."""


def counterpart(module: str) -> str:
    """Return the name that a module of Horovod has here; whether it exists is `STANDS_FOR`'s to say."""
    return module.replace("horovod.tensorflow", FACE) if "tensorflow" in module else f"hvdtrain.{module}"


STANDS_FOR = {module: counterpart(module) for module in MODULES if module_file(counterpart(module))}
"""Module here for each of Horovod's that has one."""
FACES = {ours: theirs for theirs, ours in reversed(STANDS_FOR.items())}
"""Horovod's module for each of those here."""


def module_of(parts: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Split a dotted name into its longest known module and the rest; without one the module is empty."""
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if module in MODULES or module in FACES:
            return module, tuple(parts[length:])
    return "", tuple(parts)


def is_in(module: str, name: str) -> bool:
    """Whether `from module import *` binds a name, for modules outside of the user's own."""
    if name.startswith("_"):
        return False
    file = module_file(STANDS_FOR.get(module, module))
    return file is not None and name in members_of(file).definitions


def has(module: str, name: str) -> bool:
    """Whether a module here has a name; where it is made as the module runs, whether Horovod's has it."""
    status, _ = lookup((*module.split("."), name))
    return horovod_has(FACES[module], name) if status == "unknown" and module in FACES else status != "missing"


def horovod_has(module: str, name: str) -> bool:
    """Whether Horovod itself has a name; unknown counts as yes."""
    status, _ = lookup((*module.split("."), name))
    return status != "missing"


def place_of(module: str, name: str) -> Place | None:
    """Return where a name here is defined."""
    return lookup((*module.split("."), name))[1]
