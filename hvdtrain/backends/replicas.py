"""Per-replica objects of a process."""

from collections.abc import Callable
from typing import Generic, TypeVar

from hvdtrain.backends.protocol import Backend

T = TypeVar("T")


class ForEachReplica(Generic[T]):
    """One object per replica of this process, made by `make(local index)`."""

    def __init__(self, backend: Backend, make: Callable[[int], T]) -> None:
        self._backend = backend
        self.all = [make(place) for place in range(backend.local_size)]

    @property
    def own(self) -> T:
        """The calling replica's object; outside of `Backend.run` the first one's."""
        return self.all[self._backend.local_index]
