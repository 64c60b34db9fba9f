"""When a training is saved, on disk or in memory, and what the state holds of it then."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hvdtrain.runtime.hang.activity import Activity
from hvdtrain.state.scalars import Scalars
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.loop.actions import Actions
from hvdtrain.training.loop.hooks import EPOCH_ENDS, MEASURED, Outcome, StepEnd
from hvdtrain.training.loop.keras_callbacks import KerasCallbacks
from hvdtrain.training.loop.loop import Plan, TrainingLoop
from hvdtrain.training.loop.saving import Saving
from hvdtrain.training.step.result import CompiledStep
from hvdtrain.training.update_rules.base import UpdateRule


class SavingHooks:
    """Saves the state with what metrics, callbacks and the guard of bad steps remember; every rank calls it.

    Args:
        plan: when to save.
        state: what is saved.
        rule: that updates it.
        step: the compiled step, whose metrics are saved.
        actions: of the trainer.
        callbacks: this rank's Keras callbacks, if there are any.
        activity: where the loop notes what it does.
        speaks: whether this rank warns.
    """

    def __init__(
        self,
        plan: Plan,
        state: TrainState,
        rule: UpdateRule,
        step: CompiledStep,
        actions: Actions,
        callbacks: KerasCallbacks | None,
        activity: Activity,
        *,
        speaks: bool,
    ) -> None:
        self._plan = plan
        self._state = state
        self._rule = rule
        self._step = step
        self._actions = actions
        save, finish = actions.save, actions.finish_save
        self._saving = None if save is None else Saving(state, save, finish, speaks=speaks)
        self._callbacks = callbacks
        self._activity = activity

    def add_saves(self, loop: TrainingLoop) -> None:
        """Add the hooks that save, if anything is saved."""
        if self._saving is None:
            return
        loop.add_hook(self._save, self._plan.saved)
        if self._actions.roll_back is not None:
            loop.add_hook(self._save_rolled_back, MEASURED)
        if self._plan.best is not None:
            loop.add_hook(self._save_best, EPOCH_ENDS)

    def add_commits(self, loop: TrainingLoop) -> None:
        """Add the hook that keeps the state in memory, if the training is elastic."""
        if self._actions.commit is not None:
            loop.add_hook(self._commit, self._plan.committed)
            loop.add_hook_before(lambda step: self._actions.begin_step())

    def begin(self) -> None:
        """Save the state before the first step, so that a training that may be rolled back can be from its start on.

        Raises:
            CheckpointError: it cannot be saved.
        """
        step = self._state.scalars.step
        if self._actions.roll_back is not None and step < self._plan.total_steps:
            assert self._saving is not None, "a training that can be rolled back saves"
            with self._complete_state(None), self._activity.during("saving"):
                self._saving.save_beginning(step)

    def roll_back(self) -> Scalars:
        """Give the state the tensors of the newest good checkpoint, and return the scalars of that."""
        assert self._actions.roll_back is not None, "only a training that can be rolled back is"
        assert self._saving is not None, "a training that can be rolled back saves"
        with self._activity.during("saving"):
            self._saving.finish_earlier()
            return self._actions.roll_back()

    def note_metrics(self) -> None:
        """Let the state hold what the metrics of an epoch that is not finished have counted."""
        sums = self._step.metric_sums() if self._state.scalars.step_in_epoch else {}
        self._state.scalars.progress.metrics = sums

    def note_best(self, before: dict[str, Any] | None) -> None:
        """Remember which epoch was the best `before`, if that is another one by now."""
        if self._saving is not None:
            self._saving.note_best(before)

    def _save_best(self, step: StepEnd) -> None:
        """Save the best epoch, if it ends with this step and is not saved already."""
        best = self._state.scalars.best
        if best is not None and best["step"] == step.number and not self._plan.saved.due(step):
            self._save(step)

    def _save_rolled_back(self, step: StepEnd) -> None:
        """Save after a rollback, so that a resumed run leaves out the same batches."""
        rollbacks = self._state.scalars.bad_steps.rollbacks
        if rollbacks and rollbacks[-1][1] == step.number and not self._plan.saved.due(step):
            self._save(step)

    def _save(self, step: StepEnd) -> None:
        assert self._saving is not None, "added only where something is saved"
        with self._activity.during("saving"):
            self._saving.finish_earlier()
        with self._complete_state(step), self._activity.during("saving"):
            self._saving.save(step)

    def _commit(self, step: StepEnd) -> None:
        """Keep the state in memory; where training ends there is nothing to go on with."""
        assert self._actions.commit is not None, "added only where something is committed"
        if not step.last:
            with self._complete_state(step):
                self._actions.commit()

    @contextmanager
    def _complete_state(self, step: StepEnd | None) -> Iterator[None]:
        """Add to the state what metrics, callbacks and guard remember, and drop it on exit. Collective.

        Args:
            step: that has ended; None before the first.
        """
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
            self._actions.prepare_to_save()
            yield
        finally:
            scalars.progress.callbacks, scalars.progress.metrics, self._state.held_weights = [], {}, {}
