"""Tensors of the state and the shards of them that this rank holds, with or without memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.runtime.placement import Region, box_shape, boxes_of, placement_of, whole_box


class NamedTensor(NamedTuple):
    """A tensor of the state and the shard that this replica holds."""

    value: Any
    """A tf.Variable, or anything with `dtype` and `shape` for specs.

    One dim may be longer than its shard: the excess is padding, which is neither saved nor restored. A shard of several
    dims may be stored flat, in row-major order.
    """
    global_shape: tuple[int, ...]
    slice: Region
    """This replica's shard of the full tensor."""
    replicated: bool
    """Whether every replica along dp holds the same values."""


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """Metadata of a tensor of the state."""

    path: str
    dtype: str
    global_shape: tuple[int, ...]
    slice: Region
    replicated: bool = True

    @property
    def whole(self) -> bool:
        """Whether this replica holds the full tensor."""
        return self.slice == whole_box(self.global_shape)


def replicated_tensor(value: Any) -> NamedTensor:
    """Return `value` as a replicated tensor."""
    shape = tuple(int(n) for n in value.shape)
    return NamedTensor(value, shape, whole_box(shape), replicated=True)


def spec_of(path: str, tensor: NamedTensor) -> StateSpec:
    """Return the spec of `tensor`, without reading its value."""
    dtype = getattr(tensor.value.dtype, "name", tensor.value.dtype)
    return StateSpec(
        path=path, dtype=str(dtype), global_shape=tensor.global_shape, slice=tensor.slice, replicated=tensor.replicated
    )


def values_in(whole: np.ndarray, region: Region) -> np.ndarray:
    """Return a copy of the region of a full tensor."""
    result = np.empty(box_shape(region), whole.dtype)
    for box, place in boxes_of(region):
        result[place] = whole[box]
    return result


def elements(shape: Iterable[int]) -> int:
    """Return the number of elements of a tensor of `shape`."""
    return int(np.prod(list(shape), dtype=np.int64))


def expert_parallel(variables: Mapping[str, tf.Variable]) -> dict[str, tf.Variable]:
    """Return variables, by path, that differ between replicas: experts, tables."""
    return {path: v for path, v in variables.items() if (here := placement_of(v)) is not None and here.held_by}


def is_split(model: Any) -> bool:
    """Return whether this rank holds only some layers or shards of `model`."""
    return bool(set(getattr(model, "split_along", ())) - {"cp"}) or any(
        placement_of(variable) is not None for variable in model.variables
    )


def placed_tensor(value: Any, owner: Any = None) -> NamedTensor:
    """Return a variable as a tensor of the state, with its placement.

    `owner` is, for an optimizer slot of the same shape, the variable whose placement it shares.
    """
    placement = placement_of(value if owner is None else owner)
    if placement is None or tuple(value.shape) != box_shape(placement.box):
        return replicated_tensor(value)
    return NamedTensor(value, placement.global_shape, placement.box, replicated=not placement.held_by)
