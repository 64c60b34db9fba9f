"""Step factory of pipeline training."""

from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import build_objective
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import Batch
from hvdtrain.data.shapes import check_source
from hvdtrain.data.source import Source
from hvdtrain.layers.experts import expert_layers
from hvdtrain.parallel.pipeline.exchange import StageExchange
from hvdtrain.parallel.pipeline.stage import PipelineStage
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.advice import narrow
from hvdtrain.training.compile_settings import Objective
from hvdtrain.training.evaluation.evaluate import KerasEvaluator
from hvdtrain.training.evaluation.predict import Predictor
from hvdtrain.training.options import StepOptions
from hvdtrain.training.pipelined.evaluation import PipelinedEvaluator, PipelinedPredictor, StageForward
from hvdtrain.training.pipelined.forward_backward import PipelinedForwardBackward
from hvdtrain.training.pipelined.stage_training import MetricsBackend, Regularization
from hvdtrain.training.step.batches import per_microbatch
from hvdtrain.training.step.contract import CompiledStep
from hvdtrain.training.step.logs import StepLogs
from hvdtrain.training.step.step_factory import KerasStepFactory
from hvdtrain.training.step.train_step import TrainStep
from hvdtrain.training.update_rules.base import UpdateRule


class PipelineStepFactory(KerasStepFactory):
    """Step factory of a `PipelineStage`, whose last stage computes losses and metrics."""

    def __init__(
        self, backend: Backend, model: PipelineStage, optimizer: Any, objective: Objective, options: StepOptions
    ) -> None:
        self._pipeline = backend.along("pp")
        self._figures = MetricsBackend(backend, self._pipeline, counts=model.is_last)
        self._exchange_of_stages = StageExchange(
            model.place, model.ranks, lambda place: backend.between("pp", model.place, place)
        )
        self._stage_forward = StageForward(model, self._exchange_of_stages)
        super().__init__(backend, model, optimizer, objective, options)
        if optimizer.built:
            raise ConfigError(
                f"The optimizer {optimizer.name!r} was built for the whole model, and each rank of a pipeline trains "
                "the layers of its stage: give a new optimizer."
            )

    def _new_evaluator(self) -> KerasEvaluator:
        return PipelinedEvaluator(
            self._figures, self._model, forward=self._stage_forward, regularization=Regularization(self._model)
        )

    def _new_logs(self) -> StepLogs:
        return StepLogs(self._figures, self._model, "train_step")

    def _training_forward(self) -> None:
        """Stages are called per microbatch, and recomputed individually."""

    def check(self, source: Source) -> None:
        """Reject data that do not fit the full model."""
        check_source(self._model.whole.model, source, self._objective.loss)

    def _build(self, batch: Batch) -> None:
        outputs = self._model.packed(self._model.whole.cut.graph.outputs)
        self.narrow_outputs = narrow(outputs)
        build_objective(
            self._model,
            inputs=batch.inputs,
            outputs=outputs,
            targets=batch.targets,
            sample_weight=batch.sample_weight,
        )

    def microbatch_length(self, batch: int, slices: int) -> int:
        """Return the samples per microbatch. Raises ConfigError if they are not whole."""
        uneven = self._backend.capabilities.uneven
        return per_microbatch(batch, slices, self._options.accumulate, uneven=uneven)

    def _new_step(self, state: TrainState, rule: UpdateRule, microbatch: int | None) -> CompiledStep:
        assert microbatch is not None, "a pipeline's batches are always cut"
        passes = PipelinedForwardBackward(
            backend=self._backend,
            pipeline=self._pipeline,
            exchange=self._exchange_of_stages,
            state=state,
            logs=self._logs,
            options=self._options,
            length=microbatch,
            parameters_of=rule.parameters,
        )
        return TrainStep(
            backend=self._backend,
            state=state,
            passes=passes,
            logs=self._logs,
            rule=rule,
            counts=self._model.is_last,
            experts=expert_layers(self._model.whole.model),
            figures=self._figures,
        )

    def predictor(self) -> Predictor:
        """Return the pipeline's predictor."""
        return PipelinedPredictor(self._backend, self._pipeline, self._stage_forward)
