"""Collectives among the ranks of one of Horovod's process sets."""

import os
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.collectives import AxisCollectives, AxisGroup


def is_elastic() -> bool:
    """Return whether Horovod's ranks may change: compiled functions must then not bake in their number."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", "0")))


def is_global(process_set: Any) -> bool:
    """Return whether `process_set` holds all ranks."""
    return bool(process_set.process_set_id == hvd.global_process_set.process_set_id)


def check_exists(process_set: Any) -> None:
    """Refuse a process set that was removed or never added; Horovod's ops would use all ranks for it.

    Raises:
        ConfigError: it has no id.
    """
    if process_set.process_set_id is None:
        raise ConfigError(
            f"A process set must be initialized, and not removed. Received: {process_set}. Pass it to "
            "hvd.init(process_sets=[...]) or hvd.add_process_set first."
        )


def is_included(process_set: Any) -> bool:
    """Return whether this rank is part of `process_set`, which must exist."""
    check_exists(process_set)
    return is_global(process_set) or bool(process_set.included())


def collectives_among(process_set: Any) -> AxisCollectives:
    """Return the collectives among the ranks of `process_set`; on other ranks Horovod's ops fail.

    Raises:
        ConfigError: it was removed or never added.
        ValueError: Horovod does not know its id.
    """
    check_exists(process_set)
    if is_global(process_set):
        ranks, index = tuple(range(hvd.size())), hvd.rank()
        return AxisCollectives(AxisGroup(axis="world", ranks=ranks, index=index, process_set=hvd.global_process_set))
    process_set.size()  # raises for an unknown id
    index = process_set.rank() if process_set.included() else -1
    axis = f"set{process_set.process_set_id}"
    return AxisCollectives(AxisGroup(axis=axis, ranks=tuple(process_set.ranks), index=index, process_set=process_set))


def index_of_root(root_rank: int, group: AxisCollectives) -> int:
    """Return the index of the world's rank `root_rank` among the ranks of `group`.

    Raises:
        ConfigError: it is none of them.
    """
    if root_rank not in group.group.ranks:
        raise ConfigError(
            f"root_rank must be one of the ranks that take part: {', '.join(map(str, group.group.ranks))}. "
            f"Received: {root_rank}."
        )
    return group.group.ranks.index(root_rank)


def size_of(process_set: Any) -> Any:
    """Return the number of ranks: an int, or in elastic jobs a tensor that is read at run time."""
    return hvd.size_op(process_set.process_set_id) if is_elastic() else process_set.size()


def one_over_size(process_set: Any) -> tf.Tensor:
    """Return 1 / the number of ranks, in float64."""
    return tf.math.reciprocal(tf.cast(size_of(process_set), tf.float64))
