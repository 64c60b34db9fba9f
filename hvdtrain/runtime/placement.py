"""Record the slice of each variable that this rank holds of a sharded model."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

Box: TypeAlias = tuple[slice, ...]
"""One slice with start and stop for each dim of a tensor."""


@dataclass(frozen=True)
class Ranges:
    """Several slices of one dim, which lie side by side in the tensor that holds them."""

    parts: tuple[slice, ...]


Extent: TypeAlias = slice | Ranges
Region: TypeAlias = tuple[Extent, ...]
"""What a rank holds of a tensor: of each dim one slice, or several."""

_ATTRIBUTE = "_hvdtrain_placement"
_DRAWS = "_hvdtrain_draws"
_DRAWS_FOR_SAMPLES = "_hvdtrain_draws_for_samples"


def whole_box(shape: Iterable[int]) -> Box:
    """Return the slice that is all of a tensor of `shape`."""
    return tuple(slice(0, int(n)) for n in shape)


def box_shape(box: Region) -> tuple[int, ...]:
    """Return the shape of what `box` cuts out."""
    return tuple(sum(max(0, part.stop - part.start) for part in parts_of(extent)) for extent in box)


def parts_of(extent: Extent) -> tuple[slice, ...]:
    """Return the slices of a dim that `extent` consists of."""
    return (extent,) if isinstance(extent, slice) else extent.parts


def bounds_of(region: Region) -> list[list[tuple[int, int]]]:
    """Return start and stop of each slice of each dim: what tells one region of a tensor from another."""
    return [[(part.start, part.stop) for part in parts_of(extent)] for extent in region]


def boxes_of(region: Region) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes of the whole that `region` consists of, each with its place in a tensor that holds the region."""
    dims = [list(zip(parts_of(extent), _side_by_side(extent), strict=True)) for extent in region]
    for pairs in itertools.product(*dims):
        yield tuple(part for part, _ in pairs), tuple(place for _, place in pairs)


def _side_by_side(extent: Extent) -> Iterator[slice]:
    """Yield the places of the slices of a dim in the tensor that holds them."""
    begin = 0
    for part in parts_of(extent):
        yield slice(begin, begin + part.stop - part.start)
        begin += part.stop - part.start


def extent_within(extent: Extent, start: int, stop: int) -> Extent:
    """Return what elements `start` to `stop` of a tensor that holds `extent` of a dim are of the whole dim."""
    found = []
    for part, place in zip(parts_of(extent), _side_by_side(extent), strict=True):
        first, last = max(start, place.start), min(stop, place.stop)
        if first < last:
            found.append(slice(part.start + first - place.start, part.start + last - place.start))
    return found[0] if len(found) == 1 else Ranges(tuple(found))


def even_slice(size: int, parts: int, index: int) -> slice:
    """Return the `index`-th of `parts` consecutive slices of `size` elements; the first ones may be one longer."""
    short, longer = divmod(size, parts)
    begin = index * short + min(index, longer)
    return slice(begin, begin + short + (index < longer))


@dataclass(frozen=True)
class Placement:
    """The place of a variable's values in the whole, and who has a share in its gradient.

    A variable without one is whole on every rank, and the ranks that are given different samples share its gradient.
    """

    global_shape: tuple[int, ...]
    box: Region
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
    _note(variable, _ATTRIBUTE, placement)


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
    _note(variable, _DRAWS, index)


def drawn_apart(variable: Any) -> int | None:
    """Return the place that `draw_apart` noted; None if all ranks of a replica draw the same numbers."""
    found: int | None = getattr(_tensor(variable), _DRAWS, None)
    return found


def draw_for_samples(variable: Any) -> None:
    """Let the random generator whose state `variable` is draw the same on all replicas that share their samples."""
    _note(variable, _DRAWS_FOR_SAMPLES, True)


def drawn_for_samples(variable: Any) -> bool:
    """Whether `draw_for_samples` was told of the generator."""
    return bool(getattr(_tensor(variable), _DRAWS_FOR_SAMPLES, False))


def _note(variable: Any, name: str, note: Any) -> None:
    """Set an attribute of the tf.Variable under a Keras variable.

    Keras builds layers of which only the shapes are wanted, such as those that a layer of the user's own calls, with
    variables that get their values later: the tf.Variable takes the note over then.
    """
    from hvdtrain.compat.keras_variables import when_initialized

    setattr(_tensor(variable), name, note)
    when_initialized(variable, lambda tensor: setattr(tensor, name, note))


def _tensor(variable: Any) -> Any:
    """Return the tf.Variable under a Keras variable; the Keras variable where there is none yet."""
    from hvdtrain.compat.keras_variables import tensor_of

    tensor = tensor_of(variable)
    return variable if tensor is None else tensor
