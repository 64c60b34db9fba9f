"""Which tensors, and which slices of them, a rank writes."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.checkpoint.agreement import TIMEOUT_S, Ranks, is_split
from hvdtrain.runtime.placement import bounds_of, box_shape
from hvdtrain.state.named_tensors import NamedTensor, StateSpec, elements, spec_of


class Owned(NamedTuple):
    """A slice that this rank writes; its values are read when they are written, one tensor after another."""

    spec: StateSpec
    value: Any

    def array(self) -> np.ndarray:
        """Return the values, without padding, in row-major order."""
        array, shape = np.asarray(self.value.numpy()), box_shape(self.spec.slice)
        if array.ndim != len(shape):
            return np.ascontiguousarray(array.reshape(shape))
        return np.ascontiguousarray(array[tuple(slice(0, n) for n in shape)])


class _HostArray(NamedTuple):
    """Values in the host's memory, which nobody changes."""

    array: np.ndarray

    def numpy(self) -> np.ndarray:
        return self.array


def on_host(tensor: Owned) -> Owned:
    """Return `tensor` with a copy of its values."""
    return Owned(tensor.spec, _HostArray(np.array(tensor.array(), order="C")))


def owned(tensors: Mapping[str, NamedTensor], ranks: Ranks) -> list[Owned]:
    """Return what this rank writes: of what several hold alike what no rank before it holds; all ranks call it.

    Args:
        tensors: the state.
        ranks: those that write.
    """
    if not is_split(ranks) and all(tensor.replicated for tensor in tensors.values()):
        return [Owned(spec_of(path, tensor), tensor.value) for path, tensor in tensors.items()] if ranks.primary else []
    return _first_held(tensors, ranks)


def _first_held(tensors: Mapping[str, NamedTensor], ranks: Ranks) -> list[Owned]:
    specs = [spec_of(path, tensor) for path, tensor in tensors.items()]
    mine = [[spec.path, *bounds_of(spec.slice)] for spec in specs]
    everyone = ranks.gather_bytes(json.dumps(mine).encode(), timeout=TIMEOUT_S)
    taken = {json.dumps(each) for text in everyone[: ranks.rank] for each in json.loads(text)}
    return [
        Owned(spec, tensors[spec.path].value)
        for spec, each in zip(specs, mine, strict=True)
        if json.dumps(each) not in taken and (spec.whole or elements(box_shape(spec.slice)))
    ]
