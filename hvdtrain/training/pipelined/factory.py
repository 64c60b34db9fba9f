"""Step factory of pipeline training."""

from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import Batch
from hvdtrain.data.shapes import check_source
from hvdtrain.data.source import Source
from hvdtrain.layers.experts import expert_layers
from hvdtrain.parallel.pipeline.exchange import StageExchange
from hvdtrain.parallel.pipeline.stage import PipelineStage
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.advice import narrow
from hvdtrain.training.objective.compile_settings import Objective
from hvdtrain.training.objective.metrics import MetricSet
from hvdtrain.training.options import StepOptions
from hvdtrain.training.pipelined.evaluation import PipelinedEvaluator, PipelinedPredictor, StageForward, share_outputs
from hvdtrain.training.pipelined.forward_backward import PipelinedForwardBackward
from hvdtrain.training.pipelined.losses import MetricsBackend, Regularization
from hvdtrain.training.pipelined.stage_training import PipelineOptions
from hvdtrain.training.step.batches import per_microbatch
from hvdtrain.training.step.result import CompiledStep
from hvdtrain.training.step.step_factory import CompiledStepFactory, Evaluate, Predict
from hvdtrain.training.step.train_step import TrainStep
from hvdtrain.training.update_rules.base import UpdateRule


class PipelineStepFactory(CompiledStepFactory):
    """Step factory of a `PipelineStage`."""

    def __init__(
        self, backend: Backend, model: PipelineStage, optimizer: Any, objective: Objective, options: StepOptions
    ) -> None:
        super().__init__(backend, model, optimizer, objective, options)
        self._pipeline = backend.along("pp")
        self._figures = MetricsBackend(backend, self._pipeline, counts=model.is_last)
        self._exchange = StageExchange(
            model.place, model.ranks, lambda place: backend.between("pp", model.place, place)
        )
        self._stage_forward = StageForward(model, self._exchange)
        if optimizer.built:
            raise ConfigError(
                f"The optimizer {optimizer.name!r} was built for the whole model, and each rank of a pipeline trains "
                "the layers of its stage: give a new optimizer."
            )

    def _training_forward(self) -> Any:
        return None  # stages are called per microbatch, and recomputed individually

    def _names(self) -> Any:
        return getattr(self._model.whole.model, "output_names", None)

    def check(self, source: Source) -> None:
        """Reject data that do not fit the full model."""
        self._check_targets(len(source.spec) > 1)
        check_source(self._model.whole.model, source, self._objective.loss)

    def build(self, batch: Batch, *, training: bool) -> None:
        """Build metrics from a first batch's outputs, shared with all. Collective."""
        self._check_targets(batch.targets is not None)
        if self._metrics is None:
            outputs = self._shared_outputs(batch)
            self.narrow_outputs = narrow(outputs)
            self._metrics = self._resolved_metrics(batch, outputs, self._figures)

    def _shared_outputs(self, batch: Batch) -> Any:
        def call() -> Any:
            outputs = self._stage_forward.whole(self._stage_forward(batch.inputs, "build"))
            return share_outputs(
                self._stage_forward,
                inputs=batch.inputs,
                outputs=outputs,
                gather=self._pipeline.all_gather,
                label="build",
            )

        return tf.function(call, autograph=False)()

    def _microbatch_length(self, batch: int) -> int:
        uneven = self._backend.capabilities.uneven
        return per_microbatch(batch, self._backend.data_parallel.size, self._options.accumulate, uneven=uneven)

    def _new_step(
        self, state: TrainState, metrics: MetricSet, rule: UpdateRule, microbatch: int | None, epoch_metrics: bool
    ) -> CompiledStep:
        assert microbatch is not None, "a pipeline's batches are always cut"
        options = PipelineOptions(
            schedule=self._options.pipeline_schedule,
            chunks=self._options.virtual_stages,
            microbatches=self._options.accumulate,
            length=microbatch,
            recompute=self._options.recompute,
        )
        passes = PipelinedForwardBackward(
            backend=self._backend,
            pipeline=self._pipeline,
            exchange=self._exchange,
            state=state,
            loss=self._loss,
            options=options,
            parameters_of=rule.parameters,
        )
        return TrainStep(
            backend=self._backend,
            state=state,
            loss=self._loss,
            metrics=metrics,
            rule=rule,
            epoch_metrics=epoch_metrics,
            passes=passes,
            counts=self._model.is_last,
            experts=expert_layers(self._model.whole.model),
            figures=self._figures,
        )

    def _new_evaluator(self, metrics: MetricSet) -> Evaluate:
        regularization = Regularization(self._model)
        return PipelinedEvaluator(
            backend=self._figures,
            forward=self._stage_forward,
            regularization=regularization,
            loss=self._loss,
            metrics=metrics,
        )

    def predictor(self) -> Predict:
        """Return the pipeline's predictor."""
        return PipelinedPredictor(self._backend, self._pipeline, self._stage_forward)
