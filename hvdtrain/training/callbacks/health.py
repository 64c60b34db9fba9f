"""Checks of a training's health: what they find is said, skipped, rolled back or raised before anything is saved."""

from collections.abc import Callable
from typing import Any

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.config.errors import DataError
from hvdtrain.state.scalars import Progress, Scalars
from hvdtrain.training.callbacks.bad_steps import BadStepPolicy
from hvdtrain.training.callbacks.base import MEASURED, Callback, StepEnd
from hvdtrain.training.callbacks.parts import Parts
from hvdtrain.training.clock import StepClock


class BadSteps(Callback):
    """Looks at the losses since the last measured step, and acts on bad ones. Collective.

    Args:
        roll_back: restores the newest good checkpoint's tensors, and returns its scalars; None: never.

    Raises BadStepError naming the step if the loss was NaN, infinite or a spike.
    """

    when = MEASURED

    def __init__(self, parts: Parts, policy: BadStepPolicy, roll_back: Callable[[], Scalars] | None) -> None:
        self._parts = parts
        self._policy = policy
        self._roll_back = roll_back

    def after_step(self, step: StepEnd) -> None:
        """Check, and note the mean loss in `step`."""
        measured, monitor = step.measurement, self._parts.monitor
        finite, curable = bool(measured.finite), self._roll_back is not None
        scale = None if measured.loss_scale is None else float(measured.loss_scale)
        step.loss = monitor.settle(finite_parameters=finite or curable, loss_scale=scale)
        if self._policy.settle(monitor.pop_bad_steps(), finite_parameters=finite, where=f"step {step.number}"):
            self._go_back(step)
        scalars = self._parts.state.scalars
        sums = monitor.epoch_sums if scalars.step_in_epoch else (0.0, 0.0)
        scalars.progress.loss_sum, scalars.progress.loss_weight = sums

    def _go_back(self, step: StepEnd) -> None:
        """Continue from the newest good checkpoint, discarding the batches since then."""
        assert self._roll_back is not None, "the policy asks for it only where there are checkpoints"
        parts, saved = self._parts, self._roll_back()
        same_epoch = saved.epoch == step.epoch - parts.plan.epoch_offset
        progress = saved.progress if same_epoch else Progress()
        parts.monitor.rewind(parts.state.scalars.step, (progress.loss_sum, progress.loss_weight))
        parts.step.begin_metrics(progress.metrics)
        if parts.rule.guard is not None:
            parts.rule.guard.begin(saved.recent_losses)
        self._policy.note_rollback(saved.step, step.number)


class SameBatches(Callback):
    """Compares what Python gave the ranks since the start. Collective.

    Args:
        content: returns a fingerprint of it.

    Raises DataError naming a rank that was given other batches.
    """

    when = MEASURED

    def __init__(self, backend: Backend, content: Callable[[], Any]) -> None:
        self._backend = backend
        self._content = content

    def after_step(self, step: StepEnd) -> None:
        """Compare. Collective."""
        everyone = gather(self._backend, self._content())
        for rank, content in enumerate(everyone):
            if content != everyone[0]:
                raise DataError(
                    f"By step {step.number} rank {rank} was given other batches than rank 0, so samples are lost and "
                    "repeated. What draws in the data, such as a shuffle in on_epoch_end(), needs a generator of its "
                    "own with the same seed on every rank, self.rng = np.random.default_rng(seed), and must draw "
                    'nothing else from it. If each rank is to train on batches of its own, pass shard="rank".'
                )


WAITING_SHARE = 0.05
"""Fraction of the time spent waiting for data above which a warning is given."""
WORTH_S = 2.0
"""Seconds waited below which nothing is said: a small run is over sooner than it is tuned."""
ENOUGH_STEPS = 30
"""Steady steps needed for a reliable fraction: of 3, one late batch makes 7 %."""


class DataWait(Callback):
    """Detects input-bound steps across ranks and warns once.

    Checks after a number of steady steps, then each time this number doubles; a check is a small exchange.

    Args:
        backend: the replicas: one rank's data wait delays all others in the exchange, which does not count as theirs.
    """

    when = MEASURED

    def __init__(self, backend: Backend, clock: StepClock, remedy: str, say: Callable[[str], None]) -> None:
        self._backend = backend
        self._clock = clock
        self._remedy = remedy
        self._say = say
        self._next = ENOUGH_STEPS
        self._told = False

    def after_step(self, step: StepEnd) -> None:
        """Warn if steps are input-bound. Collective."""
        if self._told or self._clock.steady_steps < self._next:
            return
        self._next = 2 * self._clock.steady_steps
        seen = gather(self._backend, [self._clock.waiting_share(), self._clock.waited()])
        if max(seconds for _, seconds in seen) < WORTH_S:
            return
        said = waiting_warning([share for share, _ in seen], self._remedy)
        if said is not None:
            self._told = True
            self._say(said)


def waiting_warning(shares: list[float], remedy: str) -> str | None:
    """Return the warning for each rank's data-wait fraction; None if all are small."""
    most = max(shares)
    if most <= WAITING_SHARE:
        return None
    where = f" on rank {shares.index(most)}" if len(shares) > 1 else ""
    return f"warning: steps wait for data {most:.0%} of the time{where}. {remedy}"
