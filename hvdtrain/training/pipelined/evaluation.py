"""Evaluation and prediction through the stages of a pipeline."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives
from hvdtrain.compat.keras import compiled_losses, loss_tracker, set_mask
from hvdtrain.data.batch import Batch
from hvdtrain.parallel.pipeline.cut import Cut
from hvdtrain.parallel.pipeline.exchange import Spec, StageExchange, boundary_specs, check_shapes
from hvdtrain.parallel.pipeline.stage import PipelineStage, with_masks
from hvdtrain.training.evaluation.evaluate import Evaluation, EvaluationHooks, KerasEvaluator
from hvdtrain.training.evaluation.predict import Predictor
from hvdtrain.training.pipelined.stage_training import MetricsBackend, Regularization
from hvdtrain.training.step.batches import inputs_for, replica_slice


class StageForward:
    """Runs batches through the stages, within a compiled function. Collective over the pipeline."""

    def __init__(self, stage: PipelineStage, exchange: StageExchange) -> None:
        self.stage = stage
        self._exchange = exchange

    def __call__(self, inputs: Any, label: str) -> Any:
        """Return the model's outputs on the last stage, None elsewhere; `label` distinguishes calls."""
        stage, cut = self.stage, self.stage.whole.cut
        known = stage.model_inputs(inputs_for(stage.whole.model, inputs))
        outputs: Any = None
        for number in stage.stages:
            received = receive_forward(stage, exchange=self._exchange, known=known, number=number, label=label)
            made = stage.run_stage(number, known, received, training=False)
            if number + 1 < cut.stages:
                sent = with_masks(cut, number, made)
                check_shapes(cut, known, number, sent)
                self._exchange.send(sent, number, number + 1, label, "forward")
            else:
                outputs = stage.outputs_of(made)
        self._exchange.finish()
        return outputs

    def specs(self, inputs: Any) -> list[Spec]:
        """Return the specs of the model's full outputs for `inputs`."""
        stage, cut = self.stage, self.stage.whole.cut
        known = stage.model_inputs(inputs_for(stage.whole.model, inputs))
        return boundary_specs(cut, known, cut.stages - 1)[: len(cut.graph.outputs)]


def receive_forward(
    stage: PipelineStage, exchange: StageExchange, known: dict[int, Any], number: int, label: str
) -> list[tf.Tensor]:
    """Return the tensors sent by the stage before `number`; none for the first."""
    if number == 0:
        return []
    specs = boundary_specs(stage.whole.cut, known, number - 1)
    return exchange.receive(specs, rows_of(known), number - 1, label, "forward")


def rows_of(known: dict[int, Any]) -> Any:
    """Return the number of samples: an int, or a tensor if dynamic."""
    first = next(iter(known.values()))
    return tf.shape(first)[0] if first.shape[0] is None else first.shape[0]


def share_outputs(
    forward: StageForward, inputs: Any, outputs: Any, gather: Callable[..., tf.Tensor], label: str
) -> Any:
    """Return the last stage's `outputs` (elsewhere None) on all ranks. Collective."""
    specs = forward.specs(inputs)
    if outputs is None:
        mine = [tf.fill([0, *spec.shape[1:]], tf.zeros([], spec.dtype)) for spec in specs]
    else:
        mine = tf.nest.flatten(outputs)
    whole = [gather(tensor, name=f"{label}/output{place}") for place, tensor in enumerate(mine)]
    shaped = [tf.ensure_shape(tensor, [None, *spec.shape[1:]]) for tensor, spec in zip(whole, specs, strict=True)]
    return forward.stage.packed(shaped)


def masked(cut: Cut, stage: int, tensors: list[Any]) -> list[Any]:
    """Attach masks listed by `with_masks`, which compiled functions remove."""
    symbols = cut.outgoing(stage)
    values = dict(zip(map(id, symbols), tensors, strict=False))
    for symbol, mask in zip(cut.masked(stage), tensors[len(symbols) :], strict=True):
        set_mask(values[id(symbol)], mask)
    return tensors[: len(symbols)]


class PipelinedEvaluator(KerasEvaluator):
    """Evaluates a model split into pipeline stages; `backend` sums over them."""

    of_stage = True

    def __init__(
        self, backend: MetricsBackend, model: PipelineStage, forward: StageForward, regularization: Regularization
    ) -> None:
        super().__init__(backend, model)
        self._forward = forward
        self._penalty = tf.function(
            lambda: backend.along("pp").all_reduce(regularization.value(), name="evaluation/penalty"), autograph=False
        )

    def __call__(self, batches: Iterable[Batch], hooks: EvaluationHooks | None = None) -> Evaluation:
        """Evaluate on `batches`, and add the penalties of all stages' weights to the loss. Collective."""
        outcome = super().__call__(batches, hooks)
        penalty = float(self._penalty())
        return outcome if outcome.loss is None else replace(outcome, loss=outcome.loss + penalty)

    def step_on(self, batch: Batch) -> Any:
        """Return the results of a batch; outputs are on the last stage alone."""
        model, outputs = self._model, self._forward(batch.inputs, "evaluation")
        if outputs is None:
            return model.get_metrics_result()
        loss = compiled_losses(model)(batch.targets, outputs, batch.sample_weight)
        loss_tracker(model).update_state(loss, sample_weight=tf.shape(tf.nest.flatten(batch.inputs)[0])[0])
        return model.compute_metrics(batch.inputs, batch.targets, outputs, batch.sample_weight)


class PipelinedPredictor(Predictor):
    """Predicts with a model split into pipeline stages."""

    def __init__(self, backend: Backend, pipeline: Collectives, forward: StageForward) -> None:
        super().__init__(backend, None)
        self._pipeline = pipeline
        self._forward = forward

    def _depends_on_batch(self, batch: Batch) -> bool:
        return False  # stages send rows of samples to one another

    def _outputs_of(self, batch: Batch) -> Any:
        batch = replica_slice(batch, self._backend)
        outputs = self._forward(batch.inputs, "prediction")
        if outputs is not None:
            whole = self._forward.stage.whole_outputs(outputs)  # along tp and cp
            outputs = self._of_all_replicas(batch, whole, "prediction/output")
        return share_outputs(
            self._forward, inputs=batch.inputs, outputs=outputs, gather=self._pipeline.all_gather, label="prediction"
        )
