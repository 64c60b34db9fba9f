"""The loop over optimizer steps, with the callbacks before and after each."""

import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, cast

from hvdtrain.data.pipeline import TrainingData, VaryingData, passes_of
from hvdtrain.runtime.hang.signs import Activity
from hvdtrain.runtime.stopping import StopAgreement
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.callbacks.base import Callback, Outcome, StepEnd
from hvdtrain.training.clock import StepClock
from hvdtrain.training.plan import Plan
from hvdtrain.training.step.contract import CompiledStep, StepResult

FEW_STEPS = 32
"""A training of no more steps measures all of them: a second graph, without measurement, takes longer to compile."""


class TrainingLoop:
    """Runs steps, and before and after each the callbacks, in their order.

    Args:
        state: the training state; its step and epoch are counted here.
        callbacks: their `measures` say which steps are measured and waited for; the others run asynchronously.
        plan: says when the training ends.
        clock: records the times of the steps.
        activity: the loop's current activity, for the hang watchdog.
        stopping: agrees on the step after which a signal stops all ranks; None: never.
        at_once: steps that are taken in one call, at most; fewer at the end of an epoch. The callbacks see them as one.
        measures_few: whether all of a few steps are measured; not where a measured step waits for others.
        measures_all: whether all steps can be waited for, as any may turn out to be the last.
    """

    def __init__(
        self,
        state: TrainState,
        step: CompiledStep,
        data: TrainingData,
        callbacks: Sequence[Callback],
        *,
        plan: Plan,
        clock: StepClock,
        activity: Activity,
        stopping: StopAgreement | None = None,
        at_once: int = 1,
        measures_few: bool = True,
        measures_all: bool = False,
    ) -> None:
        self._state = state
        self._step = step
        self._data = data
        self._callbacks = callbacks
        self._total = plan.total_steps
        self._epoch_offset = plan.epoch_offset
        self._varies = bool(getattr(data, "varies", False))
        self._until_epoch = plan.until_epoch if self._varies else None
        few = self._total - state.scalars.step <= FEW_STEPS
        self._always_measures = measures_all or (few and measures_few)
        self._clock = clock
        self._activity = activity
        self._stopping = stopping
        self._at_once = at_once
        self._first = state.scalars.step + 1

    def run(self) -> None:
        """Train from the state's step to the last, or a callback's stop."""
        scalars, clock, activity, callbacks = self._state.scalars, self._clock, self._activity, self._callbacks
        for each in callbacks:
            each.begin()
        batches = self._batches()
        known: set[Any] = set()  # kinds of steps that have been compiled
        while self._goes_on():
            step = self._next()
            activity.step, activity.phase = step.number, "callbacks"
            for each in callbacks:
                each.before_step(step)
            activity.phase = "loading"
            read = self._read(batches, step)
            step.measured = any(each.measures.due(step) for each in callbacks)
            activity.phase = "compiling" if step.first else "step"
            measure = step.measured or self._always_measures
            kind = _kind_of_step(read, measure)
            begin = time.perf_counter()
            step.results = self._take(read, measure)
            activity.times.note(begin, time.perf_counter())
            clock.tick(step.steps, waited=step.measured, compiled=kind not in known)
            known.add(kind)
            activity.phase = "callbacks"
            scalars.advance(self._steps_of_epoch(step), step.steps)
            for each in callbacks:
                if each.when.due(step) and each.after_step(step) is Outcome.STOP:
                    step.outcome = Outcome.STOP
                    step.last = step.ends_epoch = True
            if step.outcome is Outcome.STOP:
                break
            if step.measured:
                self._resume_clocks()
        if isinstance(batches, Generator):
            batches.close()  # a PyDataset is told that its epoch has ended

    def _read(self, batches: Iterator[Any], step: StepEnd) -> list[Any]:
        """Return the batches of `step`, and let it end where a pass over the data does."""
        read: list[Any] = []
        ends_pass = False
        while len(read) < step.steps and not ends_pass:
            batch = self._clock.next_of(batches)
            if self._varies:
                batch, ends_pass = batch
            read.append(batch)
            self._activity.note_read(self._clock.last_wait)
        step.number -= step.steps - len(read)
        step.steps = len(read)
        if self._varies:
            self._end_with_pass(step, ends_pass)
        return read

    def _take(self, batches: list[Any], measure: bool) -> Sequence[StepResult]:
        if len(batches) == 1:
            return [self._step(batches[0], measure=measure)]
        return self._step.several(batches, measure=measure)

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
        self._clock.resume()
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
        return self._data.steps_per_epoch if not self._varies else step.place + step.steps + (not step.ends_epoch)

    def _next(self) -> StepEnd:
        """Return the position in the run of the next step, or of several, of which the data may have fewer."""
        scalars, steps_per_epoch = self._state.scalars, self._data.steps_per_epoch
        place, left = scalars.step_in_epoch, self._total - scalars.step
        if self._until_epoch is not None:
            steps = self._at_once
        else:
            steps = min(self._at_once, left, left if self._varies else steps_per_epoch - place)
        number = scalars.step + steps
        last = steps == left
        ends_epoch = last or place + steps == steps_per_epoch
        stops = self._stopping is not None and self._stopping.begin(number)
        return StepEnd(
            number=number,
            epoch=scalars.epoch + self._epoch_offset,
            place=place,
            steps=steps,
            first=number - steps + 1 == self._first,
            ends_epoch=ends_epoch,
            last=last,
            stops=stops,
        )


def _kind_of_step(batches: Sequence[Any], measure: bool) -> tuple[bool, Any]:
    """Return what a step is compiled for: whether it is measured, and its samples and steps, as far as known."""
    samples = getattr(batches[0], "global_samples", None)
    return measure, (samples if isinstance(samples, int) else None, len(batches))
