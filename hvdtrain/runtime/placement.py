"""Which slice of a variable this rank holds, where ranks have split a model among them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

Box: TypeAlias = tuple[slice, ...]
"""One slice with start and stop for each dim of a tensor."""

_ATTRIBUTE = "_hvdtrain_placement"
_DRAWS = "_hvdtrain_draws"


def whole_box(shape: Iterable[int]) -> Box:
    """Return the slice that is all of a tensor of `shape`."""
    return tuple(slice(0, int(n)) for n in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of what `box` cuts out."""
    return tuple(max(0, part.stop - part.start) for part in box)


@dataclass(frozen=True)
class Placement:
    """The place of a variable's values in the whole, and who has a share in its gradient.

    A variable without one is whole on every rank, and the ranks that are given different samples share its gradient.
    """

    global_shape: tuple[int, ...]
    box: Box
    """The slice of the whole that this rank holds."""
    axes: tuple[str, ...] = ()
    """Axes of the mesh along which ranks hold different slices."""
    summed_over: tuple[str, ...] = ()
    """Axes along which the gradients of ranks with the same slice are parts of a sum, besides those of the replicas:
    `tp` for the norms between sequence-parallel blocks, each of which sees a part of the sequence."""
    held_by: tuple[str, ...] = ()
    """Axes of the replicas along which other ranks hold other slices, and have their own gradients: `ep`."""
    in_norm: bool = True
    """Whether this rank's gradient counts in the norm of the whole: of several stages that share a weight, one does."""


def place(variable: Any, placement: Placement) -> None:
    """Note where the values of `variable` lie in the whole.

    Args:
        variable: a Keras variable or a tf.Variable, of the shape of its slice.
        placement: its place.

    Raises:
        ValueError: the variable has another shape.
    """
    tensor = _tensor(variable)
    if tuple(tensor.shape) != box_shape(placement.box):
        raise ValueError(f"{tensor.name} has the shape {tuple(tensor.shape)}, its slice {box_shape(placement.box)}.")
    setattr(tensor, _ATTRIBUTE, placement)


def placement_of(variable: Any) -> Placement | None:
    """Return where the values of `variable` lie in the whole; None if it is whole."""
    found: Placement | None = getattr(_tensor(variable), _ATTRIBUTE, None)
    return found


def draw_apart(variable: Any, index: int) -> None:
    """Let the random generator whose state `variable` is draw other numbers on each rank of a replica.

    Args:
        variable: a Keras variable or a tf.Variable.
        index: this rank's place among those that hold slices of what is drawn for.
    """
    setattr(_tensor(variable), _DRAWS, index)


def drawn_apart(variable: Any) -> int | None:
    """Return the place that `draw_apart` noted; None if all ranks of a replica draw the same numbers."""
    found: int | None = getattr(_tensor(variable), _DRAWS, None)
    return found


def _tensor(variable: Any) -> Any:
    """Return the tf.Variable under a Keras variable."""
    value = getattr(variable, "_value", None)
    if value is None:
        value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value
