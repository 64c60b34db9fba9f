"""Step factory of training on asynchronous workers."""

from typing import Any

from hvdtrain.backends.parameter_server import ParameterServerBackend
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.layers.recompute import Recompute
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.asynchronous.evaluate import AsynchronousEvaluator, AsynchronousPredictor
from hvdtrain.training.asynchronous.step import AsynchronousStep
from hvdtrain.training.objective.compile_settings import Objective
from hvdtrain.training.objective.metrics import MetricSet
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.forward_backward import ForwardBackward
from hvdtrain.training.step.result import CompiledStep
from hvdtrain.training.step.step_factory import CompiledStepFactory, Evaluate, Predict
from hvdtrain.training.update_rules.base import UpdateRule


class AsynchronousStepFactory(CompiledStepFactory):
    """hvdtrain's step and evaluation, dispatched to workers.

    Raises ConfigError for a layer that would use other random numbers in the backward pass.
    """

    def __init__(
        self, backend: ParameterServerBackend, model: Any, optimizer: Any, objective: Objective, options: StepOptions
    ) -> None:
        super().__init__(backend, model, optimizer, objective, options)
        if any(isinstance(layer, Recompute) for layer in flatten_layers(model)):
            raise ConfigError(
                f"hvdtrain.Recompute is not for {opt('backend', backend.name)}: leave it out, or use "
                f"{opt('backend', 'horovod')}."
            )
        self._workers = backend.workers

    def _new_step(
        self, state: TrainState, metrics: MetricSet, rule: UpdateRule, microbatch: int | None, epoch_metrics: bool
    ) -> CompiledStep:
        passes = ForwardBackward(self._backend, state, self._loss)
        return AsynchronousStep(
            backend=self._backend,
            workers=self._workers,
            state=state,
            passes=passes,
            metrics=metrics,
            rule=rule,
            epoch_metrics=epoch_metrics,
        )

    def _new_evaluator(self, metrics: MetricSet) -> Evaluate:
        return AsynchronousEvaluator(
            backend=self._backend, workers=self._workers, model=self._model, loss=self._loss, metrics=metrics
        )

    def predictor(self) -> Predict:
        """Return a predictor on workers."""
        return AsynchronousPredictor(self._backend, self._workers, self._model)
