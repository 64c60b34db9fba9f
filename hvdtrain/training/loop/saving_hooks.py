"""Hooks that save a training's complete state, on disk or in memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.config.checkpoint import BestMetric
from hvdtrain.config.errors import CheckpointError, ConfigError
from hvdtrain.runtime.hang.signs import Activity
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.state.scalars import Scalars
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.loop.desync_check import DesyncCheck
from hvdtrain.training.loop.keras_callbacks import KerasCallbacks
from hvdtrain.training.loop.loop import EPOCH_ENDS, MEASURED, Actions, Outcome, Plan, StepEnd, TrainingLoop
from hvdtrain.training.step.contract import CompiledStep
from hvdtrain.training.update_rules.base import UpdateRule


def begin_best(metric: BestMetric | None, scalars: Scalars, metrics: Iterable[str], *, validated: bool) -> None:
    """Check that epochs report `metric`, and reset another metric's best epoch.

    Args:
        metric: selects the best epoch; None: not tracked.
        metrics: names reported per epoch, including the loss if there is one.
        validated: whether there are validation data.

    Raises:
        ConfigError: no epoch reports the metric; lists the available ones.
    """
    known = [f"{prefix}{name}" for prefix in ("", "val_")[: 1 + validated] for name in metrics]
    if metric is not None and metric.name not in known:
        more = "" if validated else " Those that begin with val_ need validation data."
        raise ConfigError(
            f"The best epoch is chosen by a metric of this training. Received: {metric.name!r}. It has "
            f"{', '.join(known)}.{more}"
        )
    kind = metric and (metric.name, metric.mode)
    if scalars.best is not None and kind != (scalars.best["metric"], scalars.best["mode"]):
        scalars.best = None


def note_best(metric: BestMetric | None, scalars: Scalars, step: int, logs: Mapping[str, Any]) -> None:
    """Record the epoch that ended with `step` if it is the best.

    Raises ConfigError for a metric with several values.
    """
    value = None if metric is None else logs.get(metric.name)
    if metric is None or value is None:
        return
    if hasattr(value, "shape"):
        raise ConfigError(
            f"The best epoch is chosen by a single number. Received: {metric.name!r} of {len(value)} values. Use "
            "another metric, or one that averages them, such as F1Score(average='macro')."
        )
    if metric.improves(value, scalars.best["value"] if scalars.best else None):
        scalars.best = {"metric": metric.name, "mode": metric.mode, "value": float(value), "step": step}


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


class SavingHooks:
    """Saves the state including metrics, callbacks and bad-step history. Collective.

    A checkpoint that fails while training continues is a warning; at the end, it is an error.
    """

    def __init__(
        self,
        backend: Backend,
        state: TrainState,
        plan: Plan,
        rule: UpdateRule,
        step: CompiledStep,
        actions: Actions,
        callbacks: KerasCallbacks | None,
        activity: Activity,
        desync: DesyncCheck,
    ) -> None:
        self._backend = backend
        self._state = state
        self._plan = plan
        self._rule = rule
        self._step = step
        self._actions = actions
        self._callbacks = callbacks
        self._activity = activity
        self._desync = desync
        self._begun = 0
        self._best_before: dict[int, dict[str, Any] | None] = {}

    def add_saves(self, loop: TrainingLoop) -> None:
        """Add the hooks that save, if anything is saved."""
        if self._actions.save is None:
            return
        loop.add_hook(self._save, self._plan.saved)
        if self._actions.roll_back is not None:
            loop.add_hook(self._save_rolled_back, MEASURED)
        if self._plan.best is not None:
            loop.add_hook(self._save_best, EPOCH_ENDS)

    def add_commits(self, loop: TrainingLoop) -> None:
        """Add the hook that commits the state, if the training is elastic."""
        if self._actions.commit is not None:
            loop.add_hook(self._commit, self._plan.committed)
            loop.add_hook_before(lambda step: self._actions.begin_step())

    def begin(self) -> None:
        """Save before the first step if rollbacks are possible; raise CheckpointError on failure."""
        step = self._state.scalars.step
        if self._actions.roll_back is not None and step < self._plan.total_steps:
            self._begun = step
            with self._complete_state(None), self._activity.during("saving"):
                self._attempt_save(step, needed=True)
                self._attempt(self._actions.finish_save, step, needed=True)

    def roll_back(self) -> Scalars:
        """Restore the newest good checkpoint's tensors, and return its scalars."""
        assert self._actions.roll_back is not None, "only a training that can be rolled back is"
        with self._activity.during("saving"):
            self._attempt(self._actions.finish_save, self._begun)
            return self._actions.roll_back()

    def note_metrics(self) -> None:
        """Store the metrics of an unfinished epoch in the state."""
        sums = self._step.metric_sums() if self._state.scalars.step_in_epoch else {}
        self._state.scalars.progress.metrics = sums

    def note_best(self, before: dict[str, Any] | None) -> None:
        """Remember the best epoch `before`, if it has changed: one that cannot be saved is reverted."""
        best = self._state.scalars.best
        if best is not None and best != before:
            self._best_before = {best["step"]: before}

    def _save_best(self, step: StepEnd) -> None:
        """Save a best epoch that ends here and is not saved otherwise."""
        best = self._state.scalars.best
        if best is not None and best["step"] == step.number and not self._plan.saved.due(step):
            self._save(step)

    def _save_rolled_back(self, step: StepEnd) -> None:
        """Save after a rollback, so that resumed runs discard its batches."""
        rollbacks = self._state.scalars.bad_steps.rollbacks
        if rollbacks and rollbacks[-1][1] == step.number and not self._plan.saved.due(step):
            self._save(step)

    def _save(self, step: StepEnd) -> None:
        """Save after `step`; at the end of training or on a stop, wait for it."""
        self._desync.before_save(step, callbacks=self._callbacks is not None)
        with self._activity.during("saving"):
            self._attempt(self._actions.finish_save, self._begun)
        with self._complete_state(step), self._activity.during("saving"):
            self._begun = step.number
            self._attempt_save(step.number, needed=step.last)
            if step.last or step.stops:
                self._attempt(self._actions.finish_save, step.number, needed=step.last)

    def _attempt_save(self, step: int, *, needed: bool) -> None:
        assert self._actions.save is not None, "added only where something is saved"
        self._attempt(self._actions.save, step, needed=needed)

    def _attempt(self, act: Callable[[], object], step: int, *, needed: bool = False) -> None:
        """Call `act`, of the checkpoint of `step`; a failure is a warning unless it is `needed`."""
        try:
            act()
        except CheckpointError as error:
            if needed:
                raise
            best = self._state.scalars.best
            if best is not None and best["step"] == step:
                self._state.scalars.best = self._best_before.get(step)
            if self._backend.primary:
                LOGGER.warning(f"{str(error).rstrip('.')}. Existing checkpoints stay, and training continues.")

    def _commit(self, step: StepEnd) -> None:
        """Commit the state to memory, except at the end of training."""
        assert self._actions.commit is not None, "added only where something is committed"
        if not step.last:
            with self._complete_state(step):
                self._actions.commit()

    @contextmanager
    def _complete_state(self, step: StepEnd | None) -> Iterator[None]:
        """Add metrics, callbacks and guard history to the state. Collective."""
        scalars, callbacks = self._state.scalars, self._callbacks
        try:
            if step is None or not step.ends_epoch:
                self.note_metrics()
            if self._rule.guard is not None:
                scalars.recent_losses = self._rule.guard.recent()
            if callbacks is not None:
                scalars.progress.callbacks = callbacks.states()
                self._state.held_weights = callbacks.held_weights(self._state.weight_paths())
            scalars.stopped = step is not None and step.outcome is Outcome.STOP
            self._rule.prepare_to_save()
            self._state.average_statistics(self._backend, self._rule.trainers)
            yield
        finally:
            scalars.progress.callbacks, scalars.progress.metrics, self._state.held_weights = [], {}, {}
