"""Which tensors, and which slices of them, a rank writes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.checkpoint.agreement import TIMEOUT_S, Ranks
from hvdtrain.state.named_tensors import NamedTensor, StateSpec, bounds_of, box_shape, elements, spec_of


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


def owned(tensors: Mapping[str, NamedTensor], *, index: int, primary: bool) -> Iterator[Owned]:
    """Yield what this rank writes: what all hold alike the primary, a slice the first of the replicas that hold it.

    Args:
        tensors: the state.
        index: this replica's place along dp.
        primary: whether this process is the primary.
    """
    for path, tensor in tensors.items():
        spec = spec_of(path, tensor)
        writes = primary if spec.whole and tensor.replicated else index == 0 or not tensor.replicated
        # A slice may be empty where there are more ranks than elements.
        if writes and (spec.whole or elements(box_shape(spec.slice))):
            yield Owned(spec, tensor.value)


def first_held(tensors: Mapping[str, NamedTensor], ranks: Ranks) -> list[Owned]:
    """Return what this rank writes where processes hold different parts of the model: what no rank before it holds."""
    specs = [spec_of(path, tensor) for path, tensor in tensors.items()]
    mine = [[spec.path, *bounds_of(spec.slice)] for spec in specs]
    everyone = ranks.gather_bytes(json.dumps(mine).encode(), timeout=TIMEOUT_S)
    taken = {json.dumps(each) for text in everyone[: ranks.rank] for each in json.loads(text)}
    return [
        Owned(spec, tensors[spec.path].value)
        for spec, each in zip(specs, mine, strict=True)
        if json.dumps(each) not in taken and (spec.whole or elements(box_shape(spec.slice)))
    ]
