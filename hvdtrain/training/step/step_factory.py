"""Step factories: the protocol, and the factory of hvdtrain's own step."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.batch import Batch
from hvdtrain.data.shapes import check_source
from hvdtrain.data.source import Source
from hvdtrain.layers.recompute import recomputed_model
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.advice import narrow
from hvdtrain.training.assembly import check_layers, splits_sequences
from hvdtrain.training.evaluation.evaluate import Evaluation, EvaluationHooks, Evaluator
from hvdtrain.training.evaluation.predict import Predictor
from hvdtrain.training.objective.compile_settings import Objective, build_compile_metrics, compile_for_trainer
from hvdtrain.training.objective.losses import summed_loss
from hvdtrain.training.objective.metric_specs import MetricSpec
from hvdtrain.training.objective.metrics import MetricSet
from hvdtrain.training.objective.outputs import inputs_for
from hvdtrain.training.objective.position_check import check_positions
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.batches import per_microbatch
from hvdtrain.training.step.result import CompiledStep
from hvdtrain.training.step.train_step import TrainStep
from hvdtrain.training.update_rules.base import UpdateRule
from hvdtrain.training.update_rules.select import check_rule, update_rule_for

Evaluate = Callable[[Iterable[Batch], EvaluationHooks | None], Evaluation]
Predict = Callable[[Iterable[Batch]], Any]


class StepFactory(Protocol):
    """Builds a model, its compiled step, update rule, evaluator and predictor."""

    narrow_outputs: bool
    """Whether the built model has 16-bit outputs."""

    @property
    def optimizer(self) -> Any:
        """The optimizer; of several, once built, the first that is used."""

    @property
    def has_variables(self) -> bool:
        """Whether all variables exist, without another batch."""

    def check(self, source: Source) -> None:
        """Reject data that do not fit the model, as far as known."""

    def build(self, batch: Batch, *, training: bool) -> None:
        """Build the model from a representative batch, and check loss and metrics."""

    def update_rule(self) -> UpdateRule:
        """Return the update rule of the built model, with its optimizer built."""

    def metric_names(self) -> list[str]:
        """Return the names reported per epoch, including any loss."""

    def train_step(self, state: TrainState, rule: UpdateRule, batch: int, *, epoch_metrics: bool) -> CompiledStep:
        """Return the compiled step for global batches of `batch` samples."""

    def evaluator(self) -> Evaluate:
        """Return the evaluator."""

    def predictor(self) -> Predict:
        """Return the predictor."""

    def compile_for_callbacks(self) -> None:
        """Set the model's optimizer for callbacks."""


class CompiledStepFactory:
    """Factory of hvdtrain's own step, with all options."""

    def __init__(
        self, backend: Backend, model: Any, optimizer: Any, objective: Objective, options: StepOptions
    ) -> None:
        self._backend = backend
        self._model = model
        self.optimizer = optimizer
        self._objective = objective
        self._options = options
        check_layers(model, options)
        check_rule(options, optimizer, backend)
        self._forward = self._training_forward()
        self._loss = summed_loss(objective.loss, objective.loss_weights, self._names)
        self._spec = MetricSpec(objective.metrics, objective.weighted_metrics, objective.loss)
        self._metrics: MetricSet | None = None
        self.narrow_outputs = False
        self._rule: UpdateRule | None = None
        self._evaluator: Evaluate | None = None
        self._known: dict[tuple[int | None, bool], CompiledStep] = {}
        self._composition: Hashable = None

    @property
    def has_variables(self) -> bool:
        """Whether the model is built."""
        return bool(self._model.built)

    def _training_forward(self) -> Any:
        """Return the callable for training, with recomputation if requested."""
        return recomputed_model(self._model) if self._options.recompute else self._model

    def _names(self) -> Any:
        return getattr(self._model, "output_names", None)

    def check(self, source: Source) -> None:
        """Reject data that do not fit the model or its loss."""
        self._check_targets(len(source.spec) > 1)
        check_source(self._model, source, self._objective.loss)

    def _check_targets(self, present: bool) -> None:
        """Reject data without targets. Raises DataError naming the model."""
        if not present:
            raise DataError(
                f"The data must give (inputs, targets) or (inputs, targets, sample_weight): the loss of "
                f"{type(self._model).__name__} {self._model.name!r} compares outputs with targets. Received: inputs "
                "alone, which are for a model with a train_step or a compute_loss of its own."
            )

    def build(self, batch: Batch, *, training: bool) -> None:
        """Build the model from a representative batch, and check loss and metrics."""
        self._check_targets(batch.targets is not None)
        with self._backend.scope():
            outputs = self._outputs_of(inputs_for(self._model, batch.inputs))
        check_layers(self._model, self._options)  # there may be more of them by now
        self.narrow_outputs = narrow(outputs)
        if self._metrics is None:
            self._metrics = self._resolved_metrics(batch, outputs, self._backend)

    def _resolved_metrics(self, batch: Batch, outputs: Any, figures: Any) -> MetricSet:
        """Return metrics for such full outputs, summed over ranks by `figures`.

        Raises ConfigError for a loss or metric across positions, with sharded sequences.
        """
        metrics = self._spec.resolve(batch.targets, outputs, figures, self._names)
        if splits_sequences(self._model):
            check_positions(
                self._loss, metrics=metrics, targets=batch.targets, outputs=outputs, ranks=self._backend.axes["cp"]
            )
        return metrics

    def _outputs_of(self, inputs: Any) -> Any:
        """Return the model's outputs; collective if its weights are sharded."""
        rule = self._rule
        if rule is None or rule.holds_weights:
            return self._model(inputs, training=False)

        def call() -> Any:
            with rule.gathered_weights():
                return self._backend.run(lambda: self._model(inputs, training=False))

        return tf.function(call, autograph=False)()

    def update_rule(self) -> UpdateRule:
        """Return the update rule selected by the options."""
        self._rule = update_rule_for(self._backend, self._model, self.optimizer, self._options)
        return self._rule

    def metric_names(self) -> list[str]:
        """Return `loss` and the metrics' names."""
        return ["loss", *([] if self._metrics is None else (bound.name for bound in self._metrics.bound))]

    def train_step(self, state: TrainState, rule: UpdateRule, batch: int, *, epoch_metrics: bool) -> CompiledStep:
        """Return the compiled step, cached."""
        if not self._model.trainable_variables:
            raise ConfigError(f"{type(self._model).__name__} {self._model.name!r} has no trainable variables.")
        length = self._microbatch_length(batch)
        key = (length, epoch_metrics)
        if self._composition != state.composition:
            # Made for other variables or slots: layers were frozen or unfrozen since.
            self._known.clear()
            self._composition = state.composition
        if key not in self._known:
            assert self._metrics is not None, "build comes first"
            self._known[key] = self._new_step(
                state, metrics=self._metrics, rule=rule, microbatch=length, epoch_metrics=epoch_metrics
            )
        return self._known[key]

    def _microbatch_length(self, batch: int) -> int | None:
        """Return the samples per microbatch; None without accumulation."""
        accumulate, uneven = self._options.accumulate, self._backend.capabilities.uneven
        shares = self._backend.data_parallel.size
        return per_microbatch(batch, shares, accumulate, uneven=uneven) if accumulate > 1 else None

    def _new_step(
        self, state: TrainState, metrics: MetricSet, rule: UpdateRule, microbatch: int | None, epoch_metrics: bool
    ) -> CompiledStep:
        return TrainStep(
            backend=self._backend,
            state=state,
            loss=self._loss,
            metrics=metrics,
            rule=rule,
            forward=self._forward,
            microbatch=microbatch,
            epoch_metrics=epoch_metrics,
            jit=self._options.jit,
        )

    def evaluator(self) -> Evaluate:
        """Return the evaluator, cached."""
        if self._evaluator is None:
            assert self._metrics is not None, "build comes first"
            self._evaluator = self._new_evaluator(self._metrics.fresh())
        return self._evaluator

    def _new_evaluator(self, metrics: MetricSet) -> Evaluate:
        return Evaluator(
            backend=self._backend, model=self._model, loss=self._loss, metrics=metrics, rule=lambda: self._rule
        )

    def predictor(self) -> Predict:
        """Return the predictor."""
        return Predictor(self._backend, self._model)

    def compile_for_callbacks(self) -> None:
        """Compile the model for callbacks; one compiled with this optimizer keeps its settings."""
        if getattr(self._model, "optimizer", None) is not self.optimizer:
            compile_for_trainer(self._model, self.optimizer, self._objective)
        if self._metrics is not None and self._metrics.sample is not None:
            build_compile_metrics(self._model, *self._metrics.sample)
