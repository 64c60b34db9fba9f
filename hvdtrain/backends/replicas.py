"""What each replica of a process has for itself."""

from collections.abc import Callable
from typing import Generic, TypeVar

from hvdtrain.backends.protocol import Backend

T = TypeVar("T")


class ForEachReplica(Generic[T]):
    """One object for each replica of this process, such as the variables in which it counts.

    Args:
        backend: the replicas.
        make: makes one, given the replica's place in the process.
    """

    def __init__(self, backend: Backend, make: Callable[[int], T]) -> None:
        self._backend = backend
        self.all = [make(place) for place in range(backend.local_size)]

    @property
    def own(self) -> T:
        """That of the replica which asks; outside of `Backend.run` the first one's."""
        return self.all[self._backend.local_index]
