"""Save a training's complete state, on disk or in memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hvdtrain.checkpoint.background import BackgroundSaver
from hvdtrain.checkpoint.restore import restore
from hvdtrain.config.checkpoint import BestMetric
from hvdtrain.config.errors import CheckpointError, ConfigError
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.runtime.session import Session
from hvdtrain.runtime.stopping import StopAgreement
from hvdtrain.state.scalars import Scalars, scalars_from
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.callbacks.base import STOPS, Callback, Outcome, StepEnd, When
from hvdtrain.training.callbacks.desync_check import DesyncCheck
from hvdtrain.training.callbacks.parts import Parts
from hvdtrain.training.elastic import Commits, HostsCheck


class BestEpoch:
    """The best epoch of a training, by a metric.

    Args:
        metric: selects it; None: it is not tracked.
        scalars: hold it, and lose that of another metric.
        metrics: names reported per epoch, including the loss if there is one.
        validated: whether there are validation data.

    Raises:
        ConfigError: no epoch reports the metric; lists the available ones.
    """

    def __init__(self, metric: BestMetric | None, scalars: Scalars, metrics: Iterable[str], *, validated: bool) -> None:
        self._metric = metric
        self._scalars = scalars
        self._before: dict[str, Any] | None = None
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

    def ends_with(self, step: int) -> bool:
        """Return whether the best epoch is one that ended with `step`."""
        return self._scalars.best is not None and self._scalars.best["step"] == step

    def note(self, step: int, logs: Mapping[str, Any]) -> None:
        """Record the epoch that ended with `step` if it is the best.

        Raises ConfigError for a metric with several values.
        """
        metric, best = self._metric, self._scalars.best
        value = None if metric is None else logs.get(metric.name)
        if metric is None or value is None:
            return
        if hasattr(value, "shape"):
            raise ConfigError(
                f"The best epoch is chosen by a single number. Received: {metric.name!r} of {len(value)} values. Use "
                "another metric, or one that averages them, such as F1Score(average='macro')."
            )
        if metric.improves(value, best["value"] if best else None):
            self._before = best
            self._scalars.best = {"metric": metric.name, "mode": metric.mode, "value": float(value), "step": step}

    def forget(self, step: int) -> None:
        """Go back to the best epoch before the one that ended with `step`, which cannot be saved."""
        if self.ends_with(step):
            self._scalars.best = self._before


class CompleteState:
    """Puts into the state what callbacks, metrics and the guard hold, for the time in which it is saved."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def note_metrics(self) -> None:
        """Store the metrics of an unfinished epoch in the state. Collective."""
        scalars = self._parts.state.scalars
        scalars.progress.metrics = self._parts.step.metric_sums() if scalars.step_in_epoch else {}

    @contextmanager
    def __call__(self, step: StepEnd | None) -> Iterator[None]:
        """Context in which the state is complete, after `step`, or before the first. Collective."""
        parts, state, scalars = self._parts, self._parts.state, self._parts.state.scalars
        try:
            if step is None or not step.ends_epoch:
                self.note_metrics()
            if parts.rule.guard is not None:
                scalars.recent_losses = parts.rule.guard.recent()
            if parts.keras is not None:
                scalars.progress.callbacks = parts.keras.states()
                state.held_weights = parts.keras.held_weights(state.weight_paths())
            scalars.stopped = step is not None and step.outcome is Outcome.STOP
            parts.rule.prepare_to_save()
            state.average_statistics(parts.backend, parts.rule.trainers)
            yield
        finally:
            scalars.progress.callbacks, scalars.progress.metrics, state.held_weights = [], {}, {}


class Saving(Callback):
    """Saves the complete state as planned, after the best epochs, and after rollbacks. Collective.

    A checkpoint that fails while training continues is a warning; at the end, it is an error.

    Args:
        save: saves the state, possibly in the background (`BackgroundSaver`).
        rolls_back: whether bad steps are rolled back, for which the state is saved before the first step, too.
    """

    def __init__(
        self,
        parts: Parts,
        complete: CompleteState,
        save: Callable[[TrainState], object],
        best: BestEpoch,
        desync: DesyncCheck,
        *,
        rolls_back: bool,
    ) -> None:
        planned = parts.plan.saved
        # A saved step is measured, and so checked before: no checkpoint holds non-finite values.
        self.measures = planned
        self.when = When(every=planned.every, last=True, stops=True, epoch_ends=True, measured=rolls_back)
        self._rolls_back = rolls_back
        self._parts = parts
        self._complete = complete
        self._save = save
        self._best = best
        self._desync = desync
        self._begun = 0

    def begin(self) -> None:
        """Save before the first step if rollbacks are possible; raise CheckpointError on failure."""
        parts, step = self._parts, self._parts.state.scalars.step
        if self._rolls_back and step < parts.plan.total_steps:
            self._begun = step
            with self._complete(None), parts.activity.during("saving"):
                self._attempt(self._start, step, needed=True)
                self._attempt(self._finish, step, needed=True)

    def after_step(self, step: StepEnd) -> None:
        """Save after `step` if it is due, or ends the best epoch, or was rolled back."""
        rollbacks = self._parts.state.scalars.bad_steps.rollbacks
        best = step.ends_epoch and self._best.ends_with(step.number)
        # Resumed runs discard the batches of a rollback.
        rolled_back = self._rolls_back and bool(rollbacks) and rollbacks[-1][1] == step.number
        if not (self._parts.plan.saved.due(step) or best or rolled_back):
            return
        self._desync.before_save(step, callbacks=self._parts.keras is not None)
        with self._parts.activity.during("saving"):
            self._attempt(self._finish, self._begun)
        with self._complete(step), self._parts.activity.during("saving"):
            self._begun = step.number
            self._attempt(self._start, step.number, needed=step.last)
            if step.last or step.stops:
                self._attempt(self._finish, step.number, needed=step.last)

    def roll_back(self) -> Scalars:
        """Restore the newest good checkpoint's tensors, and return its scalars. Collective.

        Those of the state are unchanged: steps and the position in the data continue. Raises CheckpointError if there
        is no good checkpoint.
        """
        assert isinstance(self._save, BackgroundSaver), "else nothing is rolled back"
        parts = self._parts
        with parts.activity.during("saving"):
            self._attempt(self._finish, self._begun)
            path = self._save.files.find_to_go_on()
            if path is None:
                raise CheckpointError("There is no checkpoint to roll back to: all were removed.")
            saved = scalars_from(restore(path, parts.state.named_tensors(), parts.backend))
            parts.rule.on_state_loaded()
            return saved

    def _start(self) -> None:
        self._save(self._parts.state)

    def _finish(self) -> None:
        if isinstance(self._save, BackgroundSaver):
            self._save.finish()

    def _attempt(self, act: Callable[[], None], step: int, *, needed: bool = False) -> None:
        """Call `act`, of the checkpoint of `step`; a failure is a warning unless it is `needed`."""
        try:
            act()
        except CheckpointError as error:
            if needed:
                raise
            self._best.forget(step)
            if self._parts.backend.primary:
                LOGGER.warning(f"{str(error).rstrip('.')}. Existing checkpoints stay, and training continues.")


class Stopping(Callback):
    """Ends the job after a step that all ranks agreed on for a signal, once it is saved.

    A training that is complete anyway ends normally.
    """

    when = STOPS

    def __init__(self, agreement: StopAgreement) -> None:
        self._agreement = agreement

    def after_step(self, step: StepEnd) -> None:
        """Raise Stopped, unless `step` is the last."""
        if not step.last:
            raise self._agreement.stopped()


class Committing(Callback):
    """Commits the complete state to memory, except at the end of training, and looks for changed hosts. Collective.

    Raises HostsChangedError if the hosts of an elastic job have changed.
    """

    def __init__(self, parts: Parts, complete: CompleteState, commits: Commits, session: Session) -> None:
        self.when = self.measures = parts.plan.committed
        self._parts = parts
        self._complete = complete
        self._commits = commits
        self._look_at_hosts = HostsCheck(session, parts.backend)

    def before_step(self, step: StepEnd) -> None:
        """Note when the step begins."""
        self._commits.note_step()

    def after_step(self, step: StepEnd) -> None:
        """Commit, and end the world if hosts have changed."""
        if not step.last:
            with self._complete(step):
                self._commits.keep(self._parts.state, self._parts.backend)
                self._look_at_hosts()
