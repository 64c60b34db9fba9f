"""Which tensors, and which slices of them, a rank writes."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.state.named_tensors import NamedTensor, StateSpec, box_shape, elements, spec_of


class Owned(NamedTuple):
    """A slice that this rank writes; its values are read when they are written, one tensor after another."""

    spec: StateSpec
    value: Any

    def array(self) -> np.ndarray:
        """Return the values, without padding, in row-major order."""
        array = np.asarray(self.value.numpy())
        inner = tuple(slice(0, n) for n in box_shape(self.spec.slice))
        return np.ascontiguousarray(array[inner])


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
