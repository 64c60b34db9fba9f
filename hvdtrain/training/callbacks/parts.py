"""What the callbacks of a training share."""

from dataclasses import dataclass

from hvdtrain.backends.protocol import Backend
from hvdtrain.observability.events import Observer
from hvdtrain.runtime.hang.signs import Activity
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.callbacks.keras_callbacks import KerasCallbacks
from hvdtrain.training.callbacks.loss_monitor import LossMonitor
from hvdtrain.training.plan import Plan
from hvdtrain.training.step.contract import CompiledStep
from hvdtrain.training.update_rules.base import UpdateRule


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A training under way, as its callbacks see it."""

    backend: Backend
    state: TrainState
    rule: UpdateRule
    step: CompiledStep
    plan: Plan
    monitor: LossMonitor
    observers: Observer
    keras: KerasCallbacks | None
    """The caller of Keras' callbacks; None if no rank has any."""
    activity: Activity
    """For the hang watchdog."""

    @property
    def waits(self) -> bool:
        """Whether ranks that go on at their own pace wait for one another in a measured step."""
        return self.backend.capabilities.asynchronous or self.rule.waits_when_measured
