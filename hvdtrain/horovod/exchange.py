"""The exchange of this project's own pieces among the ranks of one of Horovod's process sets."""

from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import global_process_set, is_elastic, rank, size, size_op
from hvdtrain.runtime.collectives import AxisCollectives, AxisGroup


def check_exists(process_set: Any) -> None:
    """Refuse a process set that was removed or never added; Horovod's ops would take it for all ranks.

    Raises:
        ConfigError: it has no id.
    """
    if process_set.process_set_id is None:
        raise ConfigError(
            f"A process set must be initialized, and not removed. Received: {process_set}. Pass it to "
            "hvd.init(process_sets=[...]) or hvd.add_process_set first."
        )


def exchange_among(process_set: Any) -> AxisCollectives:
    """Return the collectives among the ranks of `process_set`, of which this one must be part."""
    if process_set.process_set_id == global_process_set.process_set_id:
        return AxisCollectives(
            AxisGroup(axis="world", ranks=tuple(range(size())), index=rank(), process_set=global_process_set)
        )
    axis = f"set{process_set.process_set_id}"
    return AxisCollectives(
        AxisGroup(axis=axis, ranks=tuple(process_set.ranks), index=process_set.rank(), process_set=process_set)
    )


def place_among(root_rank: int, exchange: AxisCollectives) -> int:
    """Return the place of `root_rank`, which Horovod counts in the world, among the ranks that exchange.

    Raises:
        ConfigError: it is none of them.
    """
    if root_rank not in exchange.group.ranks:
        raise ConfigError(
            f"root_rank must be one of the ranks that take part: {', '.join(map(str, exchange.group.ranks))}. "
            f"Received: {root_rank}."
        )
    return exchange.group.ranks.index(root_rank)


def is_included(process_set: Any) -> bool:
    """Tell whether this rank is part of `process_set`, which must exist."""
    check_exists(process_set)
    return process_set.process_set_id == global_process_set.process_set_id or bool(process_set.included())


def size_of(process_set: Any) -> Any:
    """Return the number of ranks: an int, or where ranks may come and go, a tensor that is read when it is needed."""
    return size_op(process_set.process_set_id) if is_elastic() else process_set.size()


def one_over_size(process_set: Any) -> tf.Tensor:
    """Return 1 / the number of ranks, in float64."""
    return tf.math.reciprocal(tf.cast(size_of(process_set), tf.float64))
