"""What may look into the loop and end it: Keras callbacks, in the end."""

from collections.abc import Callable, Mapping

from hvdtrain.training.step.result import Totals


class Hooks:
    """Called on every replica, with figures over all of them; nobody looks in unless a method is overridden."""

    def begin_epoch(self, epoch: int) -> None:
        """Receive an epoch that begins, from 0."""

    def begin_step(self, number: int) -> None:
        """Receive a step that begins, from 0 within its epoch."""

    def end_step(self, number: int, totals: Totals, metrics: Callable[[], Mapping[str, float]]) -> bool:
        """Receive a finished step and its totals, weighted loss and weight first; tell whether anybody looked at it.

        `metrics` returns those of the epoch so far. It exchanges something: all replicas call it, or none.
        """
        return False

    def begin_evaluation(self) -> None:
        """Notice that the validation data are about to be evaluated."""

    def begin_test_step(self, number: int) -> None:
        """Receive an evaluation's batch that begins, from 0."""

    def end_test_step(self, number: int, so_far: Callable[[], Mapping[str, float]]) -> None:
        """Receive an evaluation's batch that is finished.

        `so_far` returns loss and metrics until here. It exchanges something: all replicas call it, or none.
        """

    def end_evaluation(self, logs: Mapping[str, float]) -> None:
        """Receive the evaluation's loss and metrics."""

    def end_epoch(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Receive an epoch's loss and metrics, those of its evaluation with `val_` before their names."""

    def stops(self) -> bool:
        """Tell whether training is to end here; alike on all replicas, which call it together."""
        return False
