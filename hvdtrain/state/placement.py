"""Sharded tensors of the state; placements themselves are in `runtime/placement.py`."""

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
    "expert_parallel",
    "is_split",
    "place",
    "placed_tensor",
    "placement_of",
]


def expert_parallel(variables: Mapping[str, tf.Variable]) -> dict[str, tf.Variable]:
    """Return variables, by path, that differ between replicas: experts, tables."""
    return {path: v for path, v in variables.items() if (here := placement_of(v)) is not None and here.held_by}


def is_split(model: Any) -> bool:
    """Return whether this rank holds only some layers or shards of `model`."""
    return bool(set(getattr(model, "split_along", ())) - {"cp"}) or any(
        placement_of(variable) is not None for variable in model.variables
    )


def exchanges_activations(model: Any) -> bool:
    """Return whether calling `model` takes several ranks."""
    return is_split(model) or bool(getattr(model, "split_along", ()))


def placed_tensor(value: Any, owner: Any = None) -> NamedTensor:
    """Return a variable as a tensor of the state, with its placement.

    `owner` is, for an optimizer slot of the same shape, the variable whose placement it shares.
    """
    placement = placement_of(value if owner is None else owner)
    if placement is None or tuple(value.shape) != box_shape(placement.box):
        return replicated_tensor(value)
    return NamedTensor(value, placement.global_shape, placement.box, replicated=not placement.held_by)
