"""The collectives and queries that scripts take from `horovod.tensorflow.mpi_ops`.

What the face improves is the face's; the rest is Horovod's own.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from horovod.common.util import (
    check_installed_version,
    get_average_backwards_compatibility_fun,
    get_ext_suffix,
    num_rank_is_power_2,
)
from horovod.tensorflow import mpi_ops as _horovods

from hvdtrain.horovod import basics, collectives
from hvdtrain.horovod.basics import *  # noqa: F403
from hvdtrain.horovod.basics import Sum, global_process_set
from hvdtrain.horovod.collectives import allgather, alltoall, broadcast, broadcast_, grouped_allgather

_ELSEWHERE = {"Compression", "check_extension", "refs_to_vars", "split_list", "vars_to_refs"}
__all__ = [
    *(name for name in basics.__all__ if name not in _ELSEWHERE),
    "allgather",
    "alltoall",
    "broadcast",
    "broadcast_",
    "check_installed_version",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "grouped_allgather",
    "num_rank_is_power_2",
]


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> tf.Tensor:
    """Reduce a tensor over the ranks; the sum by default."""
    return collectives.allreduce(**locals())


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> list[tf.Tensor]:
    """Reduce several tensors together; their sums by default."""
    return collectives.grouped_allreduce(**locals())


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce a tensor over the ranks and return this rank's shard along dim 0; of the sum by default."""
    return collectives.reducescatter(**locals())


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Reduce several tensors together and return this rank's shards; of the sums by default."""
    options = {**locals()}
    del options["name"], options["ignore_name_scope"]
    return collectives.grouped_reducescatter(**options)


def __getattr__(name: str) -> Any:
    """Return what else Horovod's module has: its gradient functions and its library."""
    return getattr(_horovods, name)
