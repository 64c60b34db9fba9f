"""The collectives and queries that scripts take from `horovod.tensorflow.mpi_ops`.

What the face improves is the face's; the rest is Horovod's own.
"""

import inspect
from collections.abc import Callable
from typing import Any

from horovod.common.util import (
    check_installed_version,
    get_average_backwards_compatibility_fun,
    get_ext_suffix,
    num_rank_is_power_2,
)
from horovod.tensorflow import mpi_ops as _horovods

from hvdtrain.compat.horovod import bare_reductions
from hvdtrain.horovod import basics, collectives
from hvdtrain.horovod.basics import *  # noqa: F403
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


def _as_horovods(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return `ours` with the order and the defaults of the arguments of `theirs`, whose op is the sum by default."""
    signature, taken = inspect.signature(theirs), inspect.signature(ours).parameters

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return ours(**{name: value for name, value in given.arguments.items() if name in taken})

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


_OURS: tuple[Callable[..., Any], ...] = (
    collectives.allreduce,
    collectives.grouped_allreduce,
    collectives.reducescatter,
    collectives.grouped_reducescatter,
)
_allreduce, _grouped_allreduce, _reducescatter, _grouped_reducescatter = map(_as_horovods, bare_reductions(), _OURS)


def __getattr__(name: str) -> Any:
    """Return what else Horovod's module has: its gradient functions and its library."""
    return getattr(_horovods, name)
