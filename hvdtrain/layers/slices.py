"""Variables of which each rank along an axis holds a slice, drawn without the whole."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.runtime.placement import Box, Placement, box_shape, even_slice, place
from hvdtrain.runtime.session import current, has_session

if TYPE_CHECKING:
    from hvdtrain.runtime.collectives import AxisCollectives


_PHILOX = 1
"""TensorFlow's number of the generator Philox (Salmon et al. 2011): 128 random bits of each value of its counter."""
_AT_ONCE = 2**20
"""Elements of whole rows that are drawn at once where a slice of their columns is kept."""


def draw_anew(variable: Any, initializer: Any) -> None:
    """Give a Keras variable another initial value; one that is drawn when it is needed is drawn by `initializer`."""
    draw_by = getattr(variable, "draw_by", None)
    if draw_by is not None:
        draw_by(initializer)
    else:
        variable.assign(initializer(variable.shape, dtype=variable.dtype))


@dataclass
class UniformSlice:
    """An initializer of variables that hold a slice; see `uniform_slice`."""

    shape: tuple[int, ...]
    box: Box
    seed: int
    bound: float

    def __call__(self, _: Any, dtype: str) -> tf.Tensor:
        """Return the slice, whatever shape is asked for."""
        return uniform_slice(self.shape, self.box, seed=self.seed, bound=self.bound, dtype=dtype)


def uniform_slice(shape: Sequence[int], box: Sequence[slice], *, seed: int, bound: float, dtype: str) -> tf.Tensor:
    """Return a slice of what `keras.initializers.RandomUniform(-bound, bound, seed)` draws for the whole tensor.

    No more is in memory than the slice and a million elements.

    Args:
        shape: of the whole tensor.
        box: the slice: one Python slice with start and stop for each dim.
        seed: of this tensor.
        bound: of the values.
        dtype: of the values.
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
    """Return elements `first` to `first + count` of what Keras draws for a tensor of that size or any larger one.

    Its generator makes numbers of a counter, which may begin anywhere.
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


HELD_APART = "ep"
"""The axis along which ranks are given different samples and hold different slices."""


def ranks_along(*axes: str) -> "AxisCollectives | None":
    """Return the collectives among this job's ranks that differ along `axes` of the mesh only; None for one rank."""
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
    """Create this rank's slice of a variable of a Keras layer, and note its place in the whole.

    Args:
        layer: a Keras layer that is being built.
        name: of the variable.
        shape: of the whole.
        cut: axes of the mesh by the dim that they cut; those with one rank cut nothing.
        seed: of the initial values.
        bound: of the initial values, which are uniform in [-bound, bound); 0: zeros.
        box: the slice, if it is not an even one.
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
        held_by = tuple(axis for axis in axes if axis == HELD_APART)
        place(variable, Placement(shape, box, axes, held_by=held_by))
    return variable


def refuse_built_before_init(layer: Any, *axes: str) -> None:
    """Refuse a layer that was built without a session if there are several ranks along `axes` by now.

    Raises:
        ConfigError: naming the layer.
    """
    ranks = ranks_along(*axes)
    if ranks is not None:
        raise ConfigError(
            f"{type(layer).__name__} {layer.name!r} was built before hvdtrain.init(), as if this process were alone, "
            f"and {ranks.size} ranks share it along {', '.join(axes)}. Build the model after init."
        )


def check_divides(size: int, what: str, axis: str, layer: Any) -> None:
    """Refuse `size` of something that the ranks along `axis` do not divide.

    Raises:
        ConfigError: with both numbers.
    """
    ranks = ranks_along(axis)
    if ranks is not None and size % ranks.size:
        raise ConfigError(
            f"The ranks along {axis} must divide what they share. Received: {size} {what} of the layer {layer.name!r}, "
            f"{ranks.size} ranks. Choose another number of {what}, or another size of {axis} in {opt('parallel')}."
        )
