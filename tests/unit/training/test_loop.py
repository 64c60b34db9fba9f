"""The loop by itself: which hooks are called when, and what they make of a step."""

import types

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import NonFiniteError
from hvdtrain.runtime.hang.signs import Activity
from hvdtrain.state.scalars import Scalars
from hvdtrain.training.callbacks import loss_monitor
from hvdtrain.training.callbacks.base import EPOCH_ENDS, EVERY_STEP, MEASURED, NEVER, STOPS, Callback, Outcome, When
from hvdtrain.training.callbacks.loss_monitor import LossMonitor
from hvdtrain.training.clock import WARM_UP_STEPS, StepClock
from hvdtrain.training.loop import FEW_STEPS, TrainingLoop
from hvdtrain.training.plan import Plan
from hvdtrain.training.step.contract import StepResult
from hvdtrain.training.step.guard import GOOD, NON_FINITE

STEPS_PER_EPOCH = 4


class Data:
    """Batches that are the numbers of their steps."""

    steps_per_epoch = STEPS_PER_EPOCH
    batch = 8
    remedy = ""

    def batches(self, start_step):
        return iter(range(start_step, 1000))


class Notes:
    """A compiled step that notes what it was called with."""

    def __init__(self):
        self.batches, self.measured, self.calls = [], [], []

    def __call__(self, batch, *, measure):
        self.batches.append(batch)
        if measure:
            self.measured.append(batch + 1)
        return StepResult(tf.zeros(3), None)

    def several(self, batches, *, measure):
        self.calls.append(len(batches))
        return [self(batch, measure=measure and batch == batches[-1]) for batch in batches]


def scalars_of(step):
    epoch, within = divmod(step, STEPS_PER_EPOCH)
    return Scalars(step=step, epoch=epoch, step_in_epoch=within)


class After(Callback):
    """Calls a function after the steps of `when`, which are measured if `measures` says so."""

    def __init__(self, when, function, measures=NEVER):
        self.when, self.measures, self.after_step = when, measures, function


def looping(plan, callbacks=(), start=0, *, saves=False, **options):
    """Return a loop that measures logged steps, its state and its step."""
    state = types.SimpleNamespace(scalars=scalars_of(start))
    step = Notes()
    measured = [plan.logged, plan.saved] if saves else [plan.logged]
    measuring = [After(NEVER, None, when) for when in measured]
    options = {"activity": Activity(), "clock": StepClock(Data.batch), **options}
    return TrainingLoop(state, step, Data(), [*measuring, *callbacks], plan=plan, **options), state, step


def noting(**whens):
    """Return a callback for each of `whens`, and the steps after which each was called."""
    called = {name: [] for name in whens}
    return [
        After(when, lambda step, name=name: called[name].append(step.number)) for name, when in whens.items()
    ], called


def test_the_watchdog_is_told_what_the_loop_does():
    activity, seen = Activity(), []

    class Telling(Data):
        def batches(self, start_step):
            for number in super().batches(start_step):
                seen.append((activity.phase, activity.step))
                yield number

    def step(batch, *, measure):
        seen.append((activity.phase, activity.step))
        return StepResult(tf.zeros(3), None)

    state = types.SimpleNamespace(scalars=scalars_of(3))
    telling = After(EVERY_STEP, lambda _: seen.append((activity.phase, activity.step)))
    TrainingLoop(state, step, Telling(), [telling], plan=Plan(5), clock=StepClock(8), activity=activity).run()
    assert seen == [
        *[("loading", 4), ("compiling", 4), ("callbacks", 4)],
        *[("loading", 5), ("step", 5), ("callbacks", 5)],
    ]
    assert activity.reads == 2


def test_hooks_are_called_when_they_are_due(monkeypatch):
    monkeypatch.setattr("hvdtrain.training.loop.FEW_STEPS", 0)
    callbacks, called = noting(
        every=EVERY_STEP,
        third=When(every=3),
        epochs=EPOCH_ENDS,
        first=When(first=True),
        last=When(last=True),
        measured=MEASURED,
        first_or_fifth=When(every=5, first=True),
        never=NEVER,
    )
    loop, state, step = looping(Plan(10, log_every=3), callbacks, start=1)
    loop.run()
    assert called == {
        "every": [*range(2, 11)],
        "third": [3, 6, 9],
        "epochs": [4, 8, 10],
        "first": [2],
        "last": [10],
        "measured": [2, 3, 4, 6, 8, 9, 10],
        "first_or_fifth": [2, 5, 10],
        "never": [],
    }
    assert step.batches == [*range(1, 10)]
    assert step.measured == called["measured"]
    assert (state.scalars.step, state.scalars.epoch) == (10, 2)


@pytest.mark.parametrize(("every", "saved"), [(None, [4, 8, 10]), (5, [5, 10]), (7, [7, 10])])
def test_saved_steps_are_measured(monkeypatch, every, saved):
    monkeypatch.setattr("hvdtrain.training.loop.FEW_STEPS", 0)
    plan = Plan(10, log_every=100, checkpoint_every=every)
    callbacks, called = noting(saved=plan.saved)
    loop, _, step = looping(plan, callbacks, saves=True)
    loop.run()
    assert called["saved"] == saved
    assert step.measured == sorted({1, 4, 8, 10, *saved})
    loop, _, step = looping(plan)
    loop.run()
    assert step.measured == [1, 4, 8, 10]


def test_a_few_steps_need_no_second_graph():
    loop, _, step = looping(Plan(3 + FEW_STEPS, log_every=100), start=3)
    loop.run()
    assert step.measured == [*range(4, 4 + FEW_STEPS)]


def test_where_a_hook_stops_those_of_the_end_that_follow_are_due():
    earlier, before = noting(last=When(last=True), epochs=EPOCH_ENDS)
    stopping = After(EVERY_STEP, lambda step: Outcome.STOP if step.number == 6 else Outcome.CONTINUE)
    later, after = noting(last=When(last=True), every=EVERY_STEP)
    loop, state, _ = looping(Plan(10), [*earlier, stopping, *later])
    loop.run()
    assert state.scalars.step == 6
    assert before == {"last": [], "epochs": [4]}
    assert after == {"last": [6], "every": [*range(1, 7)]}


# -- several steps in one call --


def test_hooks_are_called_after_the_last_of_several_steps(monkeypatch):
    """An epoch has 4 steps, so that a call of 3 is followed by one of 1; the run begins within one."""
    monkeypatch.setattr("hvdtrain.training.loop.FEW_STEPS", 0)
    callbacks, called = noting(
        every=EVERY_STEP, fifth=When(every=5), epochs=EPOCH_ENDS, first=When(first=True), measured=MEASURED
    )
    loop, state, step = looping(Plan(14, log_every=5), callbacks, start=1, at_once=3)
    loop.run()
    assert called == {
        "every": [4, 7, 8, 11, 12, 14],
        "fifth": [7, 11],
        "epochs": [4, 8, 12, 14],
        "first": [4],
        "measured": [4, 7, 8, 11, 12, 14],
    }
    assert step.batches == [*range(1, 14)]
    assert step.measured == called["measured"], "the last step of a call alone"
    assert step.calls == [3, 3, 3, 2]
    assert (state.scalars.step, state.scalars.epoch, state.scalars.step_in_epoch) == (14, 3, 2)


class Passes(Data):
    """Passes of 5 and 3 batches, of which nobody knows the length before."""

    varies = True

    def epochs(self, epoch, within):
        for length in [5, 3, 5, 3][epoch:]:
            yield iter(range(within, length))
            within = 0


def test_several_steps_end_with_a_pass():
    seen = []
    note = After(EVERY_STEP, lambda step: seen.append((step.number, step.place, step.steps, step.ends_epoch)))
    state = types.SimpleNamespace(scalars=Scalars())
    clock, plan = StepClock(8), Plan(16, until_epoch=3)
    TrainingLoop(state, Notes(), Passes(), [note], plan=plan, clock=clock, activity=Activity(), at_once=2).run()
    assert seen == [
        *[(2, 0, 2, False), (4, 2, 2, False), (5, 4, 1, True)],
        *[(7, 0, 2, False), (8, 2, 1, True)],
        *[(10, 0, 2, False), (12, 2, 2, False), (13, 4, 1, True)],
    ]
    assert (state.scalars.step, state.scalars.epoch, state.scalars.step_in_epoch) == (13, 3, 0)


def test_the_time_of_a_call_is_that_of_each_of_its_steps():
    clock = StepClock(8)
    clock.tick(4)
    clock.tick(4)
    steady = clock.steady_ms()
    assert clock.steady_steps == len(steady) == 8 - WARM_UP_STEPS
    assert len(set(steady)) == 1
    assert steady[0] > 0


def test_totals_of_several_steps_are_those_of_each():
    monitor = LossMonitor(10)
    noted(monitor, [[[1.0, 1.0, 0.0], [2.0, 1.0, 0.0]], [6.0, 1.0, 0.0]])
    assert monitor.settle(finite_parameters=True) == 3.0
    noted(monitor, [[1.0, 1.0, 0.0], [[1.0, 1.0, 0.0], [np.nan, 1.0, 0.0], [1.0, 1.0, 0.0]]])
    with pytest.raises(NonFiniteError, match="The loss became NaN or infinite at step 6 "):
        monitor.settle(finite_parameters=True)


def test_a_bad_one_of_several_steps_is_set_aside_with_what_this_rank_found():
    monitor = LossMonitor(10)
    good, bad = [1.0, 1.0, 0.0, 0.0, GOOD, np.inf], [np.nan, 1.0, np.nan, 0.0, NON_FINITE, np.inf]
    monitor.note(tf.constant([good, bad, good]), tf.constant([[1.0], [2.0], [3.0]]))
    assert monitor.settle(finite_parameters=True) == 1.0
    (found,) = monitor.pop_bad_steps()
    assert (found.number, found.here.tolist()) == (2, [2.0])


# -- the loss and the health --


def noted(monitor, rows):
    for row in rows:
        monitor.note(tf.constant(row))


def test_totals_that_nobody_asks_for_are_read_meanwhile(monkeypatch):
    monkeypatch.setattr(loss_monitor, "UNREAD_STEPS", 10)
    monitor = LossMonitor(1000)
    losses = np.arange(1.0, 96.0)
    for loss in losses:
        noted(monitor, [[2.0 * loss, 2.0, 0.0]])
        assert len(monitor._pending) < 10
    assert monitor.settle(finite_parameters=True) == pytest.approx(losses.mean())
    noted(monitor, [[3.0, 1.0, 0.0]])
    assert monitor.settle(finite_parameters=True) == pytest.approx(3.0)
    monitor.end_epoch()
    assert monitor.epoch_loss == pytest.approx((2 * losses.sum() + 3.0) / (2 * len(losses) + 1))


def test_totals_that_make_ranks_meet_wait_for_a_logged_step(monkeypatch):
    monkeypatch.setattr(loss_monitor, "UNREAD_STEPS", 10)
    monitor = LossMonitor(1000, early=False)
    noted(monitor, [[2.0, 2.0, 0.0]] * 25)
    assert len(monitor._pending) == 25
    assert monitor.settle(finite_parameters=True) == 1.0


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([1.0, 1.0, np.nan], "The data hold NaN or infinite values at step 4 "),
        ([np.inf, 1.0, 0.0], "The loss became NaN or infinite at step 4 "),
    ],
)
def test_what_is_not_finite_is_named_however_late_it_is_read(monkeypatch, bad, said):
    monkeypatch.setattr(loss_monitor, "UNREAD_STEPS", 4)
    monitor = LossMonitor(10)
    noted(monitor, [[1.0, 1.0, 0.0]] * 3 + [bad] + [[1.0, 1.0, 0.0]] * 20)
    with pytest.raises(NonFiniteError, match=said):
        monitor.settle(finite_parameters=False)


@pytest.mark.parametrize(
    ("rows", "finite"), [([[1.0, 1.0, 0.0]] * 2 + [[np.inf, 1.0, 0.0]], True), ([[1.0] * 3] * 3, False)]
)
def test_the_step_is_that_of_the_log_and_the_epoch_that_of_the_data(rows, finite):
    """After 20 steps in epochs of 4, two more epochs of 3 steps: the third step of epoch 6 is step 23."""
    monitor = LossMonitor(3, 20, 5 * 3)
    noted(monitor, rows)
    with pytest.raises(NonFiniteError, match=r"step 23 \(epoch 6\)"):
        monitor.settle(finite_parameters=finite)


@pytest.mark.parametrize(
    ("rows", "finite", "said"),
    [
        ([[1.0, 8.0, 0.0], [0.0, 1.0, 0.0], [np.nan, 8.0, 0.0]], True, "The loss .* batch of step 2 .* no samples"),
        ([[0.0, 1.0, 0.0], [1.0, 8.0, 0.0]], False, "Parameters .* batch of step 1 .* no samples"),
        ([[0.0, 1.0, 0.0], [1.0, 8.0, 0.0], [np.nan, 8.0, 0.0]], True, "a lower learning_rate"),
        ([[0.0, 8.0, 0.0], [np.nan, 8.0, 0.0]], True, "a lower learning_rate"),
    ],
)
def test_a_batch_without_samples_is_named_where_it_may_be_the_cause(rows, finite, said):
    monitor = LossMonitor(10)
    noted(monitor, rows)
    with pytest.raises(NonFiniteError, match=said):
        monitor.settle(finite_parameters=finite)


def test_skipped_steps_are_counted():
    monitor = LossMonitor(10, skips=True)
    noted(monitor, [[4.0, 2.0, 0.0], [np.inf, 2.0, 0.0], [8.0, 2.0, 0.0]])
    assert monitor.settle(finite_parameters=True, loss_scale=512.0) == 3.0
    assert monitor.skipped == 1
    noted(monitor, [[np.nan, 2.0, 0.0]])
    monitor.settle(finite_parameters=True, loss_scale=256.0)
    assert monitor.skipped == 2


def test_what_was_not_settled_is_forgotten_with_the_steps_that_are_rolled_back():
    monitor = LossMonitor(10)
    noted(monitor, [[1.0, 1.0, 0.0]])
    monitor.settle(finite_parameters=True)
    noted(monitor, [[1.0, 1.0, 0.0], [np.nan, 1.0, np.nan]])
    monitor.rewind(1, (1.0, 1.0))
    noted(monitor, [[5.0, 1.0, 0.0], [np.nan, 1.0, 0.0]])
    with pytest.raises(NonFiniteError, match="The loss became NaN or infinite at step 3 "):
        monitor.settle(finite_parameters=True)


class StopsAt:
    """Stands for the agreement of the ranks."""

    def __init__(self, step):
        self.step = step

    def begin(self, step):
        return step == self.step


def test_the_step_at_which_ranks_agree_to_stop_is_measured_and_saved_within_its_epoch(monkeypatch):
    monkeypatch.setattr("hvdtrain.training.loop.FEW_STEPS", 0)
    plan = Plan(10, log_every=100)
    callbacks, called = noting(saved=plan.saved, epochs=EPOCH_ENDS, stops=STOPS)

    def leave(step):
        raise SystemExit(75)

    callbacks.append(After(STOPS, leave))
    loop, state, step = looping(plan, callbacks, saves=True, stopping=StopsAt(6))
    with pytest.raises(SystemExit):
        loop.run()
    assert called == {"saved": [4, 6], "epochs": [4], "stops": [6]}
    assert step.measured == [1, 4, 6]
    assert state.scalars.step == 6
