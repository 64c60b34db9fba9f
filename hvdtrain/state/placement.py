"""The tensors of the state that this rank holds a slice of; the places themselves are in `runtime/placement.py`."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvdtrain.runtime.placement import (
    Placement,
    box_shape,
    draw_apart,
    draw_for_samples,
    drawn_apart,
    drawn_for_samples,
    place,
    placement_of,
)
from hvdtrain.state.named_tensors import NamedTensor, replicated_tensor

__all__ = [
    "Placement",
    "draw_apart",
    "draw_for_samples",
    "drawn_apart",
    "drawn_for_samples",
    "exchanges_activations",
    "held_apart",
    "is_split",
    "place",
    "placed_tensor",
    "placement_of",
]


def held_apart(variables: Mapping[str, tf.Variable]) -> dict[str, tf.Variable]:
    """Return those of `variables`, by path, of which replicas hold different slices, such as experts and tables."""
    return {path: v for path, v in variables.items() if (here := placement_of(v)) is not None and here.held_by}


def is_split(model: Any) -> bool:
    """Whether this rank holds a part of `model` only: some of its layers, or slices of its variables."""
    return bool(set(getattr(model, "split_along", ())) - {"cp"}) or any(
        placement_of(variable) is not None for variable in model.variables
    )


def exchanges_activations(model: Any) -> bool:
    """Whether calling `model` takes several ranks, each of which computes a part of what it gives."""
    return is_split(model) or bool(getattr(model, "split_along", ()))


def placed_tensor(value: Any, owner: Any = None) -> NamedTensor:
    """Return a variable as a tensor of the state, which every replica holds alike.

    Args:
        value: the variable.
        owner: the one whose slot it is, and whose place it shares if it has its shape; None: it stands for itself.
    """
    placement = placement_of(value if owner is None else owner)
    if placement is None or tuple(value.shape) != box_shape(placement.box):
        return replicated_tensor(value)
    return NamedTensor(value, placement.global_shape, placement.box, replicated=not placement.held_by)
