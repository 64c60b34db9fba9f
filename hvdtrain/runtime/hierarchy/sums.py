"""A sum in two levels: inside each host first, then between the hosts."""

from collections.abc import Callable, Sequence
from typing import Protocol

import tensorflow as tf

from hvdtrain.config.errors import LaunchError


class HostCollectives(Protocol):
    """What a sum in two levels needs of the ranks of one host."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def index(self) -> int:
        """This rank's place among them."""

    def scatter_rows(self, tensor: tf.Tensor, rows: Sequence[int], *, name: str) -> tf.Tensor:
        """Send `rows[i]` consecutive rows of `tensor` to rank i, and line up what came, by rank."""

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Concatenate along dim 0."""


def sum_by_host(
    tensor: tf.Tensor,
    local: HostCollectives,
    bridges: int,
    between: Callable[[tf.Tensor], tf.Tensor] | None,
    *,
    name: str,
) -> tf.Tensor:
    """Return the sum of `tensor` over all hosts, in its shape and dtype.

    Args:
        tensor: this rank's, of the same static shape on all of them.
        local: the ranks of this host.
        bridges: how many of them hold a slice; see `HostGrid`.
        between: adds up this bridge's slice, a vector, over the hosts; None on a rank that is no bridge.
        name: tells this sum from every other; `/scatter` and `/gather` are added.
    """
    elements = tensor.shape.num_elements()
    if elements is None:
        raise LaunchError(f"A sum by host needs a static shape. Received: {tensor.shape} of {name}.")
    widths = [elements // bridges + (place < elements % bridges) for place in range(bridges)]
    rows = [*widths, *[0] * (local.size - bridges)]
    came = local.scatter_rows(tf.reshape(tensor, [-1]), rows, name=f"{name}/scatter")
    mine = came if between is None else between(_folded(came, local.size, rows[local.index]))
    return tf.reshape(local.all_gather(mine, name=f"{name}/gather"), tensor.shape)


def _folded(came: tf.Tensor, ranks: int, width: int) -> tf.Tensor:
    """Add up the slices that came from each rank of the host."""
    return tf.add_n(tf.unstack(tf.reshape(came, [ranks, width])))
