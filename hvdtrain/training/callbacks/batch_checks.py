"""What `fit` checks of its steps, for steps that a script takes by itself."""

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.facts import Facts
from hvdtrain.config.options import check
from hvdtrain.optim.precision import has_dynamic_scale, loss_scale_of
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.callbacks.bad_steps import BadStepPolicy
from hvdtrain.training.callbacks.base import StepEnd
from hvdtrain.training.callbacks.desync_check import DesyncCheck
from hvdtrain.training.callbacks.loss_monitor import LossMonitor
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.contract import StepResult
from hvdtrain.training.update_rules.base import UpdateRule


class BatchChecks:
    """Policy for bad steps, and desync checks, of `Trainer.train_on_batch`.

    Raises ConfigError for options that need a `fit`.
    """

    def __init__(self, backend: Backend, state: TrainState, rule: UpdateRule, options: StepOptions) -> None:
        check(options, facts=Facts(saves=False))
        apart = options.update if options.update in ("gossip", "easgd") else None
        of_fit = {"update": apart, "servers": options.servers, "record": options.record, "replay": options.replay}
        for name, value in of_fit.items():
            if value:
                raise ConfigError(
                    f"train_on_batch does not go with {opt(name, value)}: every rank trains on its part of a batch, in "
                    "step with the others. Leave it out, or use fit."
                )
        self.rule, self.state = rule, state
        self._policy = BadStepPolicy(options, backend, state, LOGGER.info if backend.primary else lambda message: None)
        self._desync = DesyncCheck(
            backend, state=state, rule=rule, first_step=state.scalars.step, every=options.desync_every
        )
        if rule.guard is not None:
            rule.guard.begin(state.scalars.recent_losses)

    def __call__(self, result: StepResult) -> bool:
        """Check the step that was taken; return whether it was bad and skipped. Collective.

        Raises BadStepError for a bad step, or for more in a row than `max_bad_steps`; DesyncError for ranks that
        differ.
        """
        scalars, optimizer, guard = self.state.scalars, self.state.optimizer, self.rule.guard
        scaled = has_dynamic_scale(optimizer)
        monitor = LossMonitor(None, scalars.step - 1, skips=scaled)
        monitor.note(result.totals, result.here)
        monitor.settle(finite_parameters=True, loss_scale=float(loss_scale_of(optimizer)) if scaled else None)
        bad, where = monitor.pop_bad_steps(), f"step {scalars.step}"
        self._policy.settle(bad, finite_parameters=True, where=where)
        self._policy.end_epoch()
        if guard is not None:
            scalars.recent_losses = guard.recent()
        if self._desync.needed:
            self._desync.after_step(
                StepEnd(number=scalars.step, epoch=0, place=0, first=False, ends_epoch=False, last=False)
            )
        return bool(bad)
