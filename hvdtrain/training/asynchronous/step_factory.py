"""Step factory of training on asynchronous workers."""

from typing import Any

from hvdtrain.backends.parameter_server import ParameterServerBackend
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.layers.recompute import Recompute
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.asynchronous.evaluate import AsynchronousEvaluator, AsynchronousPredictor
from hvdtrain.training.asynchronous.step import AsynchronousStep
from hvdtrain.training.compile_settings import Objective
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.forward_backward import ForwardBackward
from hvdtrain.training.step.result import CompiledStep
from hvdtrain.training.step.step_factory import KerasStepFactory, Predict, StepEvaluator
from hvdtrain.training.update_rules.base import UpdateRule


class AsynchronousStepFactory(KerasStepFactory):
    """hvdtrain's step and evaluation, dispatched to workers.

    Raises ConfigError for a layer that would use other random numbers in the backward pass.
    """

    def __init__(
        self, backend: ParameterServerBackend, model: Any, optimizer: Any, objective: Objective, options: StepOptions
    ) -> None:
        self._workers = backend.workers
        super().__init__(backend, model, optimizer, objective, options)
        if any(isinstance(layer, Recompute) for layer in flatten_layers(model)):
            raise ConfigError(
                f"hvdtrain.Recompute is not for {opt('backend', backend.name)}: leave it out, or use "
                f"{opt('backend', 'horovod')}."
            )

    def _new_evaluator(self) -> StepEvaluator:
        return AsynchronousEvaluator(self._backend, self._workers, self._model)

    def _new_step(self, state: TrainState, rule: UpdateRule, microbatch: int | None) -> CompiledStep:
        passes = ForwardBackward(self._backend, state, self._logs, kinds=self._kinds, divides=False)
        return AsynchronousStep(
            backend=self._backend, workers=self._workers, state=state, passes=passes, logs=self._logs, rule=rule
        )

    def predictor(self) -> Predict:
        """Return a predictor on workers."""
        return AsynchronousPredictor(self._backend, self._workers, self._model)
