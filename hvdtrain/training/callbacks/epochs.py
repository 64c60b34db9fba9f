"""The events of Keras' `fit`: metrics of an epoch, batches, evaluation, ends of epochs, and `stop_training`."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.data.batch import Batch
from hvdtrain.data.streams.given import in_step
from hvdtrain.training.callbacks.bad_steps import BadStepPolicy
from hvdtrain.training.callbacks.base import EPOCH_ENDS, EVERY_STEP, MEASURED, NEVER, Callback, Outcome, StepEnd
from hvdtrain.training.callbacks.keras_callbacks import KerasCallbacks
from hvdtrain.training.callbacks.parts import Parts
from hvdtrain.training.callbacks.report import TrainingReport
from hvdtrain.training.callbacks.saving import BestEpoch, CompleteState
from hvdtrain.training.evaluation.evaluate import Evaluation, EvaluationHooks


class Totals(Callback):
    """Begins the epoch's metrics, and notes each step's totals without waiting for them."""

    when = EVERY_STEP

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def before_step(self, step: StepEnd) -> None:
        """Reset the metrics where Keras does: what callbacks evaluated since is not of this epoch."""
        if step.place == 0:
            if not step.first:
                self._parts.step.begin_metrics()
            self._parts.monitor.begin_epoch(step.number - step.steps + 1, step.epoch)
        self._parts.state.counts_epoch = True

    def after_step(self, step: StepEnd) -> None:
        """Note the totals."""
        for result in step.results:
            self._parts.monitor.note(result.totals, result.here)
        self._parts.observers.on_progress(step.number)


class KerasBatches(Callback):
    """Calls Keras' callbacks of batches, and those of an epoch's begin."""

    def __init__(self, parts: Parts, keras: KerasCallbacks) -> None:
        self._parts = parts
        self._keras = keras
        self.when = EVERY_STEP if keras.needs.batches else NEVER
        self.measures = EVERY_STEP if keras.needs.ends_on_nan else NEVER  # the training ends after the step
        self.stops_anywhere = keras.needs.weights and not parts.waits
        """Whether any step may be made the last one by a callback that acts after batches."""

    def before_step(self, step: StepEnd) -> None:
        """Begin the epoch with its first step, and the batch."""
        batches = self._keras.needs.batches
        if batches and step.place > 0:
            with self._waiting():
                self._parts.step.show_metrics()
        looked_at = step.first or step.place == 0 or batches
        with self._parts.rule.shown_weights() if looked_at else nullcontext():
            self._keras.begin_step(step)

    def after_step(self, step: StepEnd) -> Outcome | None:
        """End the batch, with the results of the epoch so far; stop where any step may be the last. Collective."""
        parts, keras = self._parts, self._keras
        with self._waiting():
            if keras.needs.weights:
                parts.state.average_statistics(parts.backend, parts.rule.trainers)
            parts.step.show_metrics()
            results = parts.step.results_of_step()
        with parts.rule.shown_weights():
            keras.end_step(step, results)
        if not self.stops_anywhere or step.measured or step.ends_epoch:
            return None  # the callbacks agree later
        with self._waiting():
            outcome = keras.agree(step)
        step.measured = outcome is Outcome.STOP  # checked and logged, as the last step
        return outcome

    def _waiting(self) -> AbstractContextManager[None]:
        return self._parts.activity.times.waiting()


class KerasStops(Callback):
    """Ends the training where a callback of any rank sets `stop_training`. Collective.

    Args:
        ends: whether after the ends of epochs; else within them, where a callback's stop ends the epoch, with metrics
            like any other.
    """

    def __init__(self, keras: KerasCallbacks, *, ends: bool) -> None:
        self._keras = keras
        self._ends = ends
        self.when = EPOCH_ENDS if ends else MEASURED

    def after_step(self, step: StepEnd) -> Outcome | None:
        """Let the ranks agree."""
        return None if step.ends_epoch and not self._ends else self._keras.agree(step)


class EpochEnds(Callback):
    """Evaluates, reports the epoch, and calls Keras' callbacks of its end.

    Args:
        complete: of what is saved or committed, before the metrics are reset; None: nothing is.
        validation: evaluated where the plan says so; None: never.
        evaluate: evaluates the model. Collective.
    """

    when = EPOCH_ENDS

    def __init__(
        self,
        parts: Parts,
        *,
        report: TrainingReport,
        policy: BadStepPolicy,
        best: BestEpoch,
        complete: CompleteState | None,
        validation: Iterable[Batch] | None,
        evaluate: Callable[[Iterable[Batch], EvaluationHooks | None], Evaluation],
    ) -> None:
        self._parts = parts
        self._report = report
        self._policy = policy
        self._best = best
        self._complete = complete
        self._validation = validation
        self._evaluate = evaluate

    def after_step(self, step: StepEnd) -> None:
        """End the epoch. Collective."""
        parts, keras = self._parts, self._parts.keras
        if self._complete is not None:
            self._complete.note_metrics()
        validation = self._validation if parts.plan.evaluates(step.epoch) else None
        if keras is not None:
            parts.rule.consolidate()
        elif validation is not None:
            parts.rule.prepare_to_evaluate()
        if keras is not None or validation is not None:
            parts.state.average_statistics(parts.backend, parts.rule.trainers)
        logs = self._report.training_metrics()
        parts.state.counts_epoch = False
        if parts.rule.guard is not None:
            logs["bad_steps"] = self._policy.end_epoch()
        if validation is not None:
            logs |= self._evaluated(step, validation)
        logs = broadcast_metrics(logs, parts.backend)
        self._best.note(step.number, logs)
        self._report.end_epoch(step, logs)
        if keras is not None:
            keras.end_epoch(step.epoch, logs)
            parts.rule.sync_from_model()

    def _evaluated(self, step: StepEnd, validation: Iterable[Batch]) -> dict[str, Any]:
        """Evaluate, and return the metrics prefixed by `val_`."""
        keras = self._parts.keras
        if keras is not None:
            keras.begin_evaluation()
            # Showing a batch takes an exchange, in which every rank must take part.
            validation = in_step(validation) if keras.needs.test_batches else validation
        with self._parts.activity.during("evaluation"):
            outcome = self._evaluate(validation, keras)
        if keras is not None:
            keras.end_evaluation(outcome.as_dict())
        return self._report.evaluated(step, outcome)


def broadcast_metrics(figures: Mapping[str, Any], backend: Backend) -> dict[str, Any]:
    """Return rank 0's metrics on every rank of a split model. Collective.

    Ranks along tp compute loss and metrics independently from the same samples, and pipeline stages receive them by
    different exchanges. Their rounding differs: a callback such as `ReduceLROnPlateau` might decide differently by the
    last digit.

    Args:
        figures: numbers, or arrays such as one value per class.
    """
    if not {"tp", "pp"} & set(backend.axes):
        return dict(figures)
    mine = {name: np.asarray(value).tolist() for name, value in figures.items()}
    first, *_ = gather(backend, mine)
    return {
        name: np.array(value, figures[name].dtype) if isinstance(value, list) else value
        for name, value in first.items()
    }
