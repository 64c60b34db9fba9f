"""Broadcasts of variables and collectives of objects, as `horovod.tensorflow.functions`."""

from typing import Any

from horovod.tensorflow import functions as _horovods

from hvdtrain.horovod.basics import ProcessSet, global_process_set, rank, size
from hvdtrain.horovod.collectives import allgather, broadcast, broadcast_
from hvdtrain.horovod.objects import allgather_object, broadcast_object, broadcast_object_fn
from hvdtrain.horovod.variables import broadcast_variables

__all__ = [
    "ProcessSet",
    "allgather",
    "allgather_object",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "global_process_set",
    "rank",
    "size",
]


def __getattr__(name: str) -> Any:
    """Return what else Horovod's module has."""
    return getattr(_horovods, name)
