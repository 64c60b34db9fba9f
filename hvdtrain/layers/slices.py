"""Variables of which each rank along an axis of the mesh holds a slice."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.layers.initial_slice import UniformSlice
from hvdtrain.runtime.placement import Box, Placement, box_shape, even_slice, place
from hvdtrain.runtime.session import current, has_session

if TYPE_CHECKING:
    from hvdtrain.runtime.collectives import AxisCollectives

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
