"""Sharded variables, initialized without materializing the full value."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvdtrain.compat.keras_variables import VariableState, state_of
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.runtime.placement import Box, Placement, box_shape, even_slice, place
from hvdtrain.runtime.session import current, has_session

if TYPE_CHECKING:
    from hvdtrain.runtime.collectives import AxisCollectives


_PHILOX = 1
"""TensorFlow's id of the Philox generator (Salmon et al. 2011): 128 random bits per counter value."""
_AT_ONCE = 2**20
"""Elements of full rows that are generated at once when a shard of the columns is kept."""


def reinitialize(variable: Any, initializer: Any) -> None:
    """Re-initialize a Keras variable; a lazily initialized one just gets the new `initializer`."""
    state = state_of(variable) or VariableState()  # a plain variable is assigned the value
    state.reinitialize(variable, initializer)


@dataclass
class UniformSlice:
    """Initializer of a sharded variable by `uniform_slice`."""

    shape: tuple[int, ...]
    box: Box
    seed: int
    bound: float

    def __call__(self, _: Any, dtype: str) -> tf.Tensor:
        """Return the shard, whatever the requested shape."""
        return uniform_slice(self.shape, self.box, seed=self.seed, bound=self.bound, dtype=dtype)


def uniform_slice(shape: Sequence[int], box: Sequence[slice], *, seed: int, bound: float, dtype: str) -> tf.Tensor:
    """Return a shard of `keras.initializers.RandomUniform(-bound, bound, seed)`'s full value.

    `box` has one Python slice with start and stop per dim of the full shape. At most a million elements are in memory
    besides the shard.
    """
    columns, others = prod(shape[1:]), tuple(box[1:])
    all_of_a_row = others == tuple(slice(0, size) for size in shape[1:])
    most = max(1, _AT_ONCE // max(1, columns))
    pieces = []
    for begin, end in [(box[0].start, box[0].stop)] if all_of_a_row else _chunks(box[0], most):
        flat = uniform_range(begin * columns, (end - begin) * columns, seed=seed, bound=bound, dtype=dtype)
        pieces.append(tf.reshape(flat, [end - begin, *shape[1:]])[(slice(None), *others)])
    return tf.concat(pieces, 0) if pieces else tf.zeros([part.stop - part.start for part in box], dtype)


def _chunks(rows: slice, most: int) -> Iterator[tuple[int, int]]:
    for begin in range(rows.start, rows.stop, most):
        yield begin, min(begin + most, rows.stop)


def uniform_range(first: int, count: int, *, seed: int, bound: float, dtype: str) -> tf.Tensor:
    """Return elements `first` to `first + count` of Keras' random values.

    The generator is counter-based, so it may start anywhere.
    """
    kind = tf.as_dtype(dtype)
    each = 2 if kind == tf.float64 else 4
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=tf.constant([seed, 0]))
    counter += tf.constant([first // each, 0], tf.uint64)
    before = first % each
    values = tf.raw_ops.StatelessRandomUniformV2(
        shape=[before + count], key=key, counter=counter, alg=_PHILOX, dtype=kind
    )
    low, high = (tf.cast(tf.constant(edge, tf.float32), kind) for edge in (-bound, bound))  # as Keras rounds them
    return values[before:] * (high - low) + low


EXPERT_AXIS = "ep"
"""The axis along which ranks have different samples and different shards (expert parallel)."""


def ranks_along(*axes: str) -> "AxisCollectives | None":
    """Return the collectives of this job's ranks along `axes` of the mesh; None for one rank."""
    if not has_session() or not current().world.collectives:
        return None
    group = current().world.along(*axes)
    return group if group.size > 1 else None


def add_slice(
    layer: Any,
    name: str,
    shape: tuple[int, ...],
    cut: Mapping[int, str],
    *,
    seed: int,
    bound: float = 0.0,
    box: Box | None = None,
    **options: Any,
) -> Any:
    """Create this rank's shard of a Keras layer's variable, with its placement.

    Args:
        layer: a Keras layer that is being built.
        shape: full shape.
        cut: mesh axes by the dim that they shard; axes with one rank have no effect.
        bound: initial values are uniform in [-bound, bound); 0: zeros.
        box: the shard, if uneven.
        options: of `keras.Layer.add_weight`.
    """
    ranks = {dim: (axis, group) for dim, axis in cut.items() if (group := ranks_along(axis)) is not None}
    even = (ranks.get(dim, (None, None))[1] for dim in range(len(shape)))
    box = box or tuple(
        slice(0, size) if group is None else even_slice(size, group.size, group.index)
        for size, group in zip(shape, even, strict=True)
    )

    initial = UniformSlice(shape, box, seed, bound)
    variable = layer.add_weight(box_shape(box), initializer=initial if bound else "zeros", name=name, **options)
    if ranks:
        axes = tuple(axis for axis, _ in ranks.values())
        held_by = tuple(axis for axis in axes if axis == EXPERT_AXIS)
        place(variable, Placement(shape, box, axes, held_by=held_by))
    return variable


def refuse_built_before_init(layer: Any, *axes: str) -> None:
    """Reject a layer built without a session if `axes` have several ranks. Raises ConfigError."""
    ranks = ranks_along(*axes)
    if ranks is not None:
        raise ConfigError(
            f"{type(layer).__name__} {layer.name!r} was built before hvdtrain.init(), as if this process were alone, "
            f"and {ranks.size} ranks share it along {', '.join(axes)}. Build the model after init."
        )


def check_divides(size: int, what: str, axis: str, layer: Any) -> None:
    """Reject a `size` that is not divisible by the ranks along `axis`. Raises ConfigError with both numbers."""
    ranks = ranks_along(axis)
    if ranks is not None and size % ranks.size:
        raise ConfigError(
            f"The ranks along {axis} must divide what they share. Received: {size} {what} of the layer {layer.name!r}, "
            f"{ranks.size} ranks. Choose another number of {what}, or another size of {axis} in {opt('parallel')}."
        )
