"""Comparison of the ranks' lists of variables before a broadcast, in which lists that differ would wait forever."""

import zlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.collectives import AxisCollectives
from hvdtrain.state.variables import path_of


def check_same_variables(variables: Sequence[tf.Variable], exchange: AxisCollectives) -> None:
    """Check that every rank has as many variables, of the same shapes and dtypes in the same order.

    Raises:
        ConfigError: on every rank, if they differ; names the ranks, or the first variable that differs.
    """
    if exchange.size == 1:
        return
    own = [zlib.crc32(f"{variable.shape} {variable.dtype.name}".encode()) for variable in variables]
    summaries = gathered([len(own), zlib.crc32(str(own).encode())], exchange)
    if (summaries == summaries[0]).all():
        return
    counts = [int(count) for count, _ in summaries]
    ranks = exchange.group.ranks
    if len(set(counts)) > 1:
        found = ", ".join(f"{count} on rank {rank}" for count, rank in zip(counts, ranks, strict=True))
        raise ConfigError(f"A broadcast needs the same variables on every rank. Received: {found}. {_ADVICE}")
    place = int((gathered(own, exchange) != own).any(axis=0).argmax())
    variable = variables[place]
    raise ConfigError(
        "A broadcast needs variables of the same shapes and dtypes, in the same order, on every rank. Received: as "
        f"number {place}, {path_of(variable)} of shape {tuple(variable.shape)} and {variable.dtype.name} on rank "
        f"{ranks[exchange.index]}, and another on another rank. {_ADVICE}"
    )


_ADVICE = (
    "Build model and optimizer on every rank first: call the model on a batch, and optimizer.build(variables) or one "
    "step, or broadcast after the first step."
)


def gathered(values: Sequence[int], exchange: AxisCollectives) -> np.ndarray:
    """Return a row of as many numbers of each rank."""

    def gather(row: tf.Tensor) -> tf.Tensor:
        return exchange.all_gather(row, name="broadcast/agreement")

    own = tf.constant([values], tf.int64)
    # A new graph for each call is meant; TensorFlow would warn about retracing.
    return np.asarray(tf.function(gather, autograph=False).get_concrete_function(own)(own))
