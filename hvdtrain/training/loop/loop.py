"""The loop over optimizer steps, with the hooks called after each."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Any, cast

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.checkpoint import BestMetric
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData, VaryingData, passes_of
from hvdtrain.runtime.hang.signs import Activity
from hvdtrain.runtime.stopping import StopAgreement
from hvdtrain.state.scalars import Scalars
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.evaluation.evaluate import Evaluation, EvaluationHooks
from hvdtrain.training.loop.clock import StepClock
from hvdtrain.training.step.contract import CompiledStep, StepResult


@dataclass(frozen=True, kw_only=True)
class Actions:
    """Operations around the training that the loop calls. Each is collective."""

    evaluate: Callable[[Iterable[Batch], EvaluationHooks | None], Evaluation]
    """Evaluates the model."""
    save: Callable[[], object] | None
    """Saves the state, possibly in the background; None: never."""
    finish_save: Callable[[], object] = lambda: None
    """Waits until it is saved."""
    commit: Callable[[], object] | None = None
    """Commits the state to memory, and ends an elastic world whose hosts have changed; None: not elastic."""
    begin_step: Callable[[], None] = lambda: None
    """Called before each step of elastic training."""
    roll_back: Callable[[], Scalars] | None = None
    """Restores the newest good checkpoint's tensors, and returns its scalars; None: never."""


class Outcome(IntEnum):
    """Effect of a hook on the loop; the same on every rank."""

    CONTINUE = 0
    STOP = 1
    """Stop after this step. Later hooks that are due at the end of an epoch or of training still run."""


@dataclass(slots=True, kw_only=True)
class StepEnd:
    """A completed step, as seen by hooks."""

    number: int
    """Completed optimizer steps, including this one."""
    epoch: int
    """Epoch, from 0."""
    place: int
    """Step within the epoch, from 0."""
    first: bool
    """Whether it is the first step of training."""
    ends_epoch: bool
    """Whether it is the last step of its epoch, possibly cut short."""
    last: bool
    """Whether it is the last step of training, as planned or stopped by an earlier hook."""
    stops: bool = False
    """Whether all ranks stop after it because of a signal; its epoch continues when resumed."""
    measured: bool = False
    """Whether it was measured, and so waited for."""
    result: StepResult | None = None
    outcome: Outcome = Outcome.CONTINUE
    """Effect of earlier hooks."""


@dataclass(frozen=True)
class When:
    """Steps after which a hook is due."""

    every: int | None = None
    """Steps whose number is divisible by this."""
    first: bool = False
    epoch_ends: bool = False
    last: bool = False
    measured: bool = False
    stops: bool = False

    def due(self, step: StepEnd) -> bool:
        """Return whether a hook is due after `step`."""
        return bool(
            (self.every and step.number % self.every == 0)
            or (self.measured and step.measured)
            or (self.epoch_ends and step.ends_epoch)
            or (self.first and step.first)
            or (self.last and step.last)
            or (self.stops and step.stops)
        )


EVERY_STEP = When(every=1)
MEASURED = When(measured=True)
EPOCH_ENDS = When(epoch_ends=True)
STOPS = When(stops=True)

Hook = Callable[[StepEnd], Outcome | None]
"""Called after a step; None means `Outcome.CONTINUE`."""


@dataclass(frozen=True)
class Plan:
    """Plan of the loop: when it stops, logs and saves, in optimizer steps."""

    total_steps: int
    _: KW_ONLY
    log_every: int = 10
    checkpoint_every: int | None = None
    """None: at the end of every epoch."""
    commit_every: int | None = None
    """Steps between commits of elastic training; None: not elastic."""
    best: BestMetric | None = None
    """Metric whose best epoch is also saved."""
    validation_freq: int | tuple[int, ...] = 1
    """Epochs between evaluations, or the epochs to evaluate after, counted from 1."""
    epoch_offset: int = 0
    """Added to the state's epoch in messages: `fit` counts from its `initial_epoch`."""
    until_epoch: int | None = None
    """The state's epoch at the end, for data whose passes differ in length; then `total_steps` is expected."""

    def evaluates(self, epoch: int) -> bool:
        """Return whether `epoch`, from 0, ends with an evaluation."""
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq

    @property
    def logged(self) -> When:
        """Logged steps."""
        return When(every=self.log_every, first=True, epoch_ends=True, last=True)

    @property
    def saved(self) -> When:
        """Steps after which the state is saved, if at all."""
        return When(every=self.checkpoint_every, epoch_ends=self.checkpoint_every is None, last=True, stops=True)

    @property
    def committed(self) -> When:
        """Steps after which the state is committed, if at all."""
        return When(every=self.commit_every)


FEW_STEPS = 32
"""A training of no more steps measures all of them: a second graph, without measurement, takes longer to compile."""


class TrainingLoop:
    """Runs steps, and after each the due hooks in registration order.

    Args:
        state: the training state; its step and epoch are counted here.
        epoch_offset: as in `Plan`.
        until_epoch: as in `Plan`.
        measured: when a step is measured and waited for; other steps run asynchronously.
        activity: the loop's current activity, for the hang watchdog.
        stopping: agrees on the step after which a signal stops all ranks; None: never.
        measures_few: whether all of a few steps are measured; not where a measured step waits for others.
        measures_all: whether all steps can be waited for, as any may turn out to be the last.
    """

    def __init__(
        self,
        backend: Backend,
        state: TrainState,
        step: CompiledStep,
        data: TrainingData,
        *,
        total_steps: int,
        measured: list[When],
        epoch_offset: int = 0,
        until_epoch: int | None = None,
        activity: Activity | None = None,
        stopping: StopAgreement | None = None,
        measures_few: bool = True,
        measures_all: bool = False,
    ) -> None:
        self._backend = backend
        self._state = state
        self._step = step
        self._data = data
        self._total = total_steps
        self._epoch_offset = epoch_offset
        self._varies = bool(getattr(data, "varies", False))
        self._until_epoch = until_epoch if self._varies else None
        self._measured = measured
        few = total_steps - state.scalars.step <= FEW_STEPS
        self._always_measures = measures_all or (few and measures_few)
        self._activity = activity or Activity()
        self._stopping = stopping
        self._first = state.scalars.step + 1
        self._hooks: list[tuple[When, Hook]] = []
        self._before: list[Callable[[StepEnd], None]] = []
        self.clock = StepClock(data.batch, overlapping=backend.capabilities.asynchronous)

    def add_hook(self, hook: Hook, when: When) -> None:
        """Call `hook` after the steps of `when`, after previously added hooks.

        It returns its effect on the loop, the same on every rank.
        """
        self._hooks.append((when, hook))

    def add_hook_before(self, hook: Callable[[StepEnd], None]) -> None:
        """Call `hook` before every step, with the facts known by then."""
        self._before.append(hook)

    def run(self) -> None:
        """Train from the state's step to the last, or a hook's stop."""
        scalars = self._state.scalars
        batches, activity = self._batches(), self._activity
        known: set[Any] = set()  # kinds of steps that have been compiled
        while self._goes_on():
            step = self._next()
            activity.step, activity.phase = step.number, "callbacks"
            for before in self._before:
                before(step)
            activity.phase = "loading"
            batch = self.clock.next_of(batches)
            if self._varies:
                batch, ends_pass = batch
                self._end_with_pass(step, ends_pass)
            step.measured = any(when.due(step) for when in self._measured)
            activity.note_read(self.clock.last_wait)
            activity.phase = "compiling" if step.first else "step"
            measure = step.measured or self._always_measures
            kind = _kind_of_step(batch, measure)
            begin = time.perf_counter()
            step.result = self._step(batch, measure=measure)
            activity.times.note(begin, time.perf_counter())
            self.clock.tick(waited=step.measured, compiled=kind not in known)
            known.add(kind)
            activity.phase = "callbacks"
            scalars.advance(self._steps_of_epoch(step))
            self._call_hooks(step)
            if step.outcome is Outcome.STOP:
                break
            if step.measured:
                self._resume_clocks()
        if isinstance(batches, Generator):
            batches.close()  # a PyDataset is told that its epoch has ended

    def _batches(self) -> Iterator[Any]:
        """Return the batches from the state's position on, and start the clock."""
        scalars, data = self._state.scalars, self._data
        if self._varies:
            batches: Iterator[Any] = passes_of(cast(VaryingData, data), scalars.epoch, scalars.step_in_epoch)
        else:
            batches = iter(data.batches(scalars.place_in_data(data.steps_per_epoch)))
        self._resume_clocks()
        return batches

    def _resume_clocks(self) -> None:
        """Exclude the time since the last step, maybe spent on synchronization."""
        self.clock.resume()
        self._activity.times.pause()

    def _goes_on(self) -> bool:
        scalars = self._state.scalars
        return scalars.step < self._total if self._until_epoch is None else scalars.epoch < self._until_epoch

    def _end_with_pass(self, step: StepEnd, ends: bool) -> None:
        """Let `step` end its epoch if its batch is the last of a pass."""
        if self._until_epoch is not None:
            step.last = ends and self._state.scalars.epoch + 1 == self._until_epoch
        step.ends_epoch = step.last or ends

    def _steps_of_epoch(self, step: StepEnd) -> int:
        """Return the steps of the epoch of `step`; of a pass whose length is unknown, one more than so far."""
        return self._data.steps_per_epoch if not self._varies else step.place + (1 if step.ends_epoch else 2)

    def _next(self) -> StepEnd:
        """Return the next step's position in the run."""
        scalars, steps_per_epoch = self._state.scalars, self._data.steps_per_epoch
        number, place = scalars.step + 1, scalars.step_in_epoch
        last = number == self._total
        ends_epoch = last or place + 1 == steps_per_epoch
        stops = self._stopping is not None and self._stopping.begin(number)
        return StepEnd(
            number=number,
            epoch=scalars.epoch + self._epoch_offset,
            place=place,
            first=number == self._first,
            ends_epoch=ends_epoch,
            last=last,
            stops=stops,
        )

    def _call_hooks(self, step: StepEnd) -> None:
        for when, hook in self._hooks:
            if when.due(step) and hook(step) is Outcome.STOP:
                step.outcome = Outcome.STOP
                step.last = step.ends_epoch = True


def _kind_of_step(batch: Any, measure: bool) -> tuple[bool, Any]:
    """Return what a step is compiled for: whether it is measured, and how many samples it has, where that is known."""
    samples = getattr(batch, "global_samples", None)
    return measure, samples if isinstance(samples, int) else None
