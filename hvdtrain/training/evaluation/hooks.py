"""What may look into an evaluation: Keras callbacks, in the end."""

from collections.abc import Callable, Mapping
from typing import Any


class EvaluationHooks:
    """Called on every replica, with figures over all of them; nobody looks in unless a method is overridden."""

    def begin_test_step(self, number: int) -> None:
        """Receive an evaluation's batch that begins, from 0."""

    def end_test_step(self, number: int, so_far: Callable[[], Mapping[str, Any]]) -> None:
        """Receive an evaluation's batch that is finished.

        `so_far` returns loss and metrics until here. It exchanges something: all replicas call it, or none.
        """
