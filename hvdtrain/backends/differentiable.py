"""Collectives with gradients, for models that are split within one replica.

Each function is the adjoint of its partner: where one gathers in the forward pass, the other gathers in the backward
pass. Horovod's registered gradients are not used: those of its all-gather and reduce-scatter are wrong by a factor of
the number of ranks. The pairs are those of Shoeybi et al. 2019 (arXiv:1909.08053, f and g) and Korthikanti et al. 2022
(arXiv:2205.05198, g and its conjugate along the sequence).

Every call has a name that is the same on all ranks of the group and unique within a step; the backward pass appends
`/back`.
"""

from collections.abc import Callable

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.runtime.placement import even_slice


def copy_to(x: tf.Tensor, group: Collectives, *, name: str) -> tf.Tensor:
    """Return a replicated `x` for rank-specific use; its gradients are all-reduced."""
    return _pair(x, lambda value: value, lambda dy: group.all_reduce(dy, name=f"{name}/back"))


def sum_from(x: tf.Tensor, group: Collectives, *, name: str) -> tf.Tensor:
    """All-reduce `x`, for replicated use; the gradient passes unchanged."""
    return _pair(x, lambda value: group.all_reduce(value, name=name), lambda dy: dy)


def gather_from(x: tf.Tensor, group: Collectives, dim: int, *, name: str, length: int | None = None) -> tf.Tensor:
    """All-gather shards along `dim`, for replicated use; the gradient is sliced.

    With `length`, shards may differ by one element, as in `even_slice`; without it, all are equal.
    """
    if length is None or length % group.size == 0:
        return _pair(x, lambda value: _gathered(value, group, dim, name), lambda dy: _own_part(dy, group, dim))
    lengths = [part.stop - part.start for part in (even_slice(length, group.size, i) for i in range(group.size))]
    return _pair(
        x,
        lambda value: _gathered(value, group=group, dim=dim, name=name, length=length),
        lambda dy: tf.split(dy, lengths, axis=dim)[group.index],
    )


def slice_to(x: tf.Tensor, group: Collectives, dim: int, *, name: str) -> tf.Tensor:
    """Return this rank's shard of a replicated `x` along `dim`; gradients are all-gathered."""
    return _pair(x, lambda value: _own_part(value, group, dim), lambda dy: _gathered(dy, group, dim, f"{name}/back"))


def gather_to(x: tf.Tensor, group: Collectives, dim: int, *, name: str) -> tf.Tensor:
    """All-gather shards along `dim`, for rank-specific use; gradients are reduce-scattered."""
    return _pair(
        x,
        lambda value: _gathered(value, group, dim, name),
        lambda dy: _summed_part(dy, group, dim, f"{name}/back"),
    )


def sum_slices_from(x: tf.Tensor, group: Collectives, dim: int, *, name: str) -> tf.Tensor:
    """Reduce-scatter `x` along `dim`; gradients are all-gathered."""
    return _pair(
        x,
        lambda value: _summed_part(value, group, dim, name),
        lambda dy: _gathered(dy, group, dim, f"{name}/back"),
    )


def exchange_parts(x: tf.Tensor, group: Collectives, cut: int, joined: int, *, name: str) -> tf.Tensor:
    """All-to-all: split `x` along dim `cut`, and concatenate the received parts along dim `joined`.

    With `cut` and `joined` swapped it is its own inverse and its own adjoint. Dim `cut` must be a static multiple of
    the number of ranks; all ranks must have the same shape.
    """
    return _pair(
        x,
        lambda value: _exchanged(value, group=group, cut=cut, joined=joined, name=name),
        lambda dy: _exchanged(dy, group=group, cut=joined, joined=cut, name=f"{name}/back"),
    )


def _pair(
    x: tf.Tensor, forward: Callable[[tf.Tensor], tf.Tensor], backward: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    @tf.custom_gradient
    def apply(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(forward(value)), backward

    return apply(x)


def _first(x: tf.Tensor, dim: int) -> tuple[tf.Tensor, list[int]]:
    """Move `dim` to the front; return the result and the inverse permutation."""
    rank = x.shape.rank
    dim %= rank
    order = [dim, *(i for i in range(rank) if i != dim)]
    back = [order.index(i) for i in range(rank)]
    return (x, back) if dim == 0 else (tf.transpose(x, order), back)


def _gathered(x: tf.Tensor, group: Collectives, dim: int, name: str, length: int | None = None) -> tf.Tensor:
    if group.size == 1:
        return x
    first, back = _first(x, dim)
    whole = group.all_gather(first, name=name)
    if first.shape[0] is not None:
        whole = tf.ensure_shape(whole, [length or first.shape[0] * group.size, *first.shape[1:]])
    return whole if dim == 0 else tf.transpose(whole, back)


def _summed_part(x: tf.Tensor, group: Collectives, dim: int, name: str) -> tf.Tensor:
    """Reduce-scatter by an all-to-all, which MPI and Gloo do faster."""
    if group.size == 1:
        return x
    first, back = _first(x, dim)
    rows = tf.shape(first)[0] // group.size
    parts = tf.reshape(group.all_to_all(first, name=name), tf.concat([[group.size, rows], tf.shape(first)[1:]], 0))
    mine = tf.reduce_sum(parts, 0)
    static = None if first.shape[0] is None else first.shape[0] // group.size
    mine = tf.ensure_shape(mine, [static, *first.shape[1:]])
    return mine if dim == 0 else tf.transpose(mine, back)


def _own_part(x: tf.Tensor, group: Collectives, dim: int) -> tf.Tensor:
    return x if group.size == 1 else tf.split(x, group.size, axis=dim)[group.index]


def _exchanged(x: tf.Tensor, group: Collectives, cut: int, joined: int, name: str) -> tf.Tensor:
    if group.size == 1:
        return x
    parts = tf.stack(tf.split(x, group.size, axis=cut))
    flat = tf.reshape(parts, tf.concat([[-1], tf.shape(parts)[2:]], 0))
    came = tf.reshape(group.all_to_all(flat, name=name), tf.shape(parts))
    came.set_shape(parts.shape)
    return tf.concat(tf.unstack(came, num=group.size), axis=joined)
