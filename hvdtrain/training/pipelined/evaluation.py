"""Evaluation and prediction through the stages of a pipeline."""

from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives
from hvdtrain.data.batch import Batch
from hvdtrain.training.evaluation.evaluate import Evaluator
from hvdtrain.training.evaluation.predict import Predictor
from hvdtrain.training.objective.losses import LossFunction
from hvdtrain.training.objective.metrics import MetricSet
from hvdtrain.training.pipelined.figures import FiguresBackend
from hvdtrain.training.pipelined.forward import StageForward, share_outputs
from hvdtrain.training.pipelined.regularization import Regularization
from hvdtrain.training.step.replica_slice import replica_slice


class PipelinedEvaluator(Evaluator):
    """Evaluates a model whose layers are on several ranks; see `Evaluator`."""

    def __init__(
        self,
        backend: FiguresBackend,
        forward: StageForward,
        regularization: Regularization,
        loss: LossFunction,
        metrics: MetricSet,
    ) -> None:
        super().__init__(backend, None, loss, metrics)
        self._forward = forward
        self._regularization = regularization

    def _exchanges(self) -> bool:
        return True

    def _update_replica(self, batch: Batch) -> None:
        batch = replica_slice(batch, self._backend)
        outputs = self._forward(batch.inputs, "evaluation")
        if outputs is None:
            return
        summed = self._loss(batch.targets, outputs, batch.sample_weight)
        share = tf.cast(tf.stack([summed.total, summed.weight]), tf.float64)
        self._sums.own.assign_add(tf.where(batch.has_samples > 0, share, tf.zeros_like(share)))
        self._metrics.update(batch.targets, outputs, batch.sample_weight, batch.has_samples)

    def _summed(self, name: str) -> tf.Tensor:
        total, weight = tf.unstack(self._backend.all_reduce(self._sums.own.read_value(), name=name), num=2)
        penalty = self._backend.along("pp").all_reduce(self._regularization.value(), name=f"{name}/penalty")
        return tf.stack([total + weight * penalty, weight])


class PipelinedPredictor(Predictor):
    """Predicts with a model whose layers are on several ranks; see `Predictor`."""

    def __init__(self, backend: Backend, pipeline: Collectives, forward: StageForward) -> None:
        super().__init__(backend, None)
        self._pipeline = pipeline
        self._forward = forward

    def _outputs_of(self, batch: Batch) -> Any:
        batch = replica_slice(batch, self._backend)
        outputs = self._forward.whole(self._forward(batch.inputs, "prediction"))
        if outputs is not None:
            outputs = self._of_all_replicas(batch, outputs)
        return share_outputs(
            self._forward, inputs=batch.inputs, outputs=outputs, gather=self._pipeline.all_gather, label="prediction"
        )
