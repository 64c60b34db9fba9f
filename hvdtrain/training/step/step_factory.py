"""Factory of compiled steps, update rule, evaluator and predictor of a model."""

import inspect
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import build_from, compile_arguments, flatten_layers, global_seed
from hvdtrain.config.errors import ConfigError, DataError, UserError
from hvdtrain.config.options import check
from hvdtrain.data.batch import Batch, specs_of_all
from hvdtrain.data.shapes import check_source
from hvdtrain.data.source import Source
from hvdtrain.gradients.distributed_optimizer import refuse_exchange_of_microbatches
from hvdtrain.layers.recompute import recomputed_model
from hvdtrain.optim.averaging import innermost
from hvdtrain.optim.optimizers import NoOptimizer
from hvdtrain.runtime.logs import warn_on_first
from hvdtrain.state.optimizers import MAIN, optimizers_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.state.variables import unwrap
from hvdtrain.training.advice import about_views, narrow
from hvdtrain.training.assembly import job_facts, model_facts, splits_sequences
from hvdtrain.training.compile_settings import Objective, compile_for_trainer
from hvdtrain.training.evaluation.evaluate import KerasEvaluator
from hvdtrain.training.evaluation.predict import Predictor
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.batches import (
    forms_own_loss,
    has_own_train_step,
    keras_data,
    number_of_samples,
    per_microbatch,
    reads_outputs,
)
from hvdtrain.training.step.checks import check_positions
from hvdtrain.training.step.contract import CompiledStep
from hvdtrain.training.step.eligibility import (
    has_rows,
    refuse_own_step,
    sees_whole_batch,
    warning_of_own_parts,
)
from hvdtrain.training.step.fetch_notes import FetchNotes
from hvdtrain.training.step.forward_backward import ForwardBackward
from hvdtrain.training.step.logs import StepLogs
from hvdtrain.training.step.optimizers import (
    OptimizerExchange,
    OptimizersStep,
    OptimizersUpdate,
    applies_once,
    take_step,
    unapplied,
)
from hvdtrain.training.step.own_code import has_own_code
from hvdtrain.training.step.train_step import TrainStep
from hvdtrain.training.step.whole_batch import WholeBatchPass
from hvdtrain.training.update_rules.base import UpdateRule
from hvdtrain.training.update_rules.select import update_rule_for


class KerasStepFactory:
    """Factory of steps by the model's `train_step`, Keras' or its own.

    Args:
        model: one with its own `compile` is compiled.
        optimizer: the new `model.optimizer`, or one of the model's optimizers.
        objective: losses and metrics, as for `Model.compile`.

    Raises:
        ConfigError: options that exclude one another, or settings that belong to the model's own `compile`.
    """

    def __init__(
        self, backend: Backend, model: Any, optimizer: Any, objective: Objective, options: StepOptions
    ) -> None:
        self._backend = backend
        self._model = model
        self._options = options
        self._objective = objective
        self._given = optimizer
        if type(model).compile is not keras.Model.compile:
            _set_optimizer(model, optimizer, objective)
        else:
            compile_for_trainer(model, optimizer, objective)
        for each in optimizers_of(model).values():
            refuse_exchange_of_microbatches(each, "Trainer")
        self._forward = self._training_forward()
        self._logs = self._new_logs()
        self._rule: UpdateRule | None = None
        self._evaluator = self._new_evaluator()
        self.warnings: list[str] = []
        self._several = len(optimizers_of(model)) > 1
        self._exchange: OptimizerExchange | None = None
        self._known: dict[int | None, CompiledStep] = {}
        self._composition: Hashable = None
        self._built = False
        self._has_rows = True
        self._notes: FetchNotes | None = None
        self.narrow_outputs = False

    @property
    def optimizer(self) -> Any:
        """The optimizer with the reported learning rate."""
        if self._exchange is not None:
            return self._exchange.main
        return getattr(self._model, MAIN, None) or next(iter(optimizers_of(self._model).values()), self._given)

    @property
    def has_variables(self) -> bool:
        """Whether all variables exist; those of several optimizers are only known after tracing."""
        return self._built or bool(self._model.built and not self._several)

    def check(self, source: Source) -> None:
        """Reject data that do not fit the model or its loss."""
        present = len(source.spec) > 1
        self._check_targets(present)
        if present and not has_own_train_step(self._model):
            check_source(self._model, source, self._objective.loss)

    def _check_targets(self, present: bool) -> None:
        """Reject data without targets for a compiled loss. Raises DataError."""
        if not present and self._objective.loss is not None and not reads_outputs(self._model):
            raise DataError(
                f"The data must give (inputs, targets) or (inputs, targets, sample_weight): the loss of "
                f"{type(self._model).__name__} {self._model.name!r} compares outputs with targets. Received: inputs "
                "alone."
            )

    def build(self, batch: Batch, *, training: bool) -> None:
        """Build model, losses and metrics from a representative batch; nothing is computed or counted.

        Only the trace of a `train_step` of a model's own shows which optimizers it uses, and how.
        """
        if self._built:
            return
        try:
            self._build_from(batch, training=training)
        except Exception as error:
            if not isinstance(error, UserError) and (note := about_views(batch.inputs, self._backend.size)):
                error.add_note(note)
            raise

    def _build_from(self, batch: Batch, *, training: bool) -> None:
        self._has_rows = has_rows(batch)
        self._evaluator.batch_means = self._takes_means()
        if training:
            self._say_what_is_apart(has_own_train_step(self._model) or forms_own_loss(self._model, "train_step"))
        if self._sees_whole_batch() if training else self._evaluates_whole_batch():
            batch = specs_of_all(batch, self._options.accumulate if training else 1)
        with self._backend.scope():
            if not has_own_train_step(self._model):
                self._build(batch)
            elif training:
                self._settle_own_step(batch)
            else:
                tf.function(self._model.test_step, autograph=False).get_concrete_function(keras_data(batch))
                return
        self._built = True

    def _sees_whole_batch(self) -> bool:
        """Return whether the model's own code computes with the samples of all replicas in training."""
        return self._has_rows and sees_whole_batch(self._backend, self._model, self._options)

    def _evaluates_whole_batch(self) -> bool:
        """Return whether it does so in evaluation, in which update rules and XLA have no part."""
        plain = StepOptions(whole_batch=self._options.whole_batch)
        sees = self._has_rows and sees_whole_batch(self._backend, self._model, plain)
        if not sees and forms_own_loss(self._model, "test_step"):
            refuse_own_step(self._backend, self._model, plain, has_rows=self._has_rows)
        return sees

    def _evaluates_apart(self) -> bool:
        """Return whether evaluation may call Python with each replica's samples, as training does, and say so once."""
        if self._sees_whole_batch() or forms_own_loss(self._model, "test_step"):
            return False
        line = warning_of_own_parts(self._backend, self._model, self._options, has_rows=self._has_rows)
        if line not in self.warnings:
            warn_on_first(line.removeprefix("warning: "))
        return True

    def check_evaluation(self) -> None:
        """Reject evaluation between epochs by a `test_step` of the model's own that cannot be computed here.

        Raises ConfigError, before an epoch is trained in vain.
        """
        self._evaluates_whole_batch()

    def _takes_means(self) -> bool:
        """Return whether a loss that is one number for the samples of a replica is that of a batch of its own."""
        return self._backend.size == 1 or not self._options.whole_batch

    def _say_what_is_apart(self, forms_loss: bool) -> None:
        """Say which code of the model's own computes with each replica's samples alone.

        Raises ConfigError for a step of its own.
        """
        if self._sees_whole_batch():
            return
        if forms_loss:
            refuse_own_step(self._backend, self._model, self._options, has_rows=self._has_rows)
        elif line := warning_of_own_parts(self._backend, self._model, self._options, has_rows=self._has_rows):
            self.warnings = [line]

    def update_rule(self) -> UpdateRule:
        """Return the update rule selected by the options; of several optimizers, each applies at once."""
        if self._several:
            self._rule = OptimizersUpdate(self._backend, self._model, self._exchanging().optimizers)
        else:
            self._rule = update_rule_for(self._backend, self._model, self.optimizer, self._options)
        return self._rule

    def is_settled(self, rule: UpdateRule) -> bool:
        """Return whether `rule` fits how the step applies gradients, which the trace of a model's own step shows."""
        return isinstance(rule, OptimizersUpdate) == self._several

    def metric_names(self) -> list[str]:
        """Return the names of the step's results."""
        if self._logs.names or has_own_train_step(self._model):
            return self._logs.names
        return list(self._model.get_metrics_result())

    def train_step(self, state: TrainState, rule: UpdateRule, batch: int) -> CompiledStep:
        """Return the compiled step, cached."""
        if not self._model.trainable_variables and self._options.chosen():
            raise ConfigError(
                f"{type(self._model).__name__} {self._model.name!r} has no trainable variables, for which "
                f"options of the step can do nothing: leave out {', '.join(self._options.chosen())}."
            )
        length = self.microbatch_length(batch, rule.slices)
        if self._composition != state.composition:
            # Made for other variables or slots: layers were frozen or unfrozen since.
            self._known.clear()
            self._composition = state.composition
        if length not in self._known:
            self._known[length] = self._new_step(state, rule=rule, microbatch=length)
        return self._known[length]

    def evaluator(self) -> KerasEvaluator:
        """Return the evaluator by `test_step`."""
        return self._evaluator

    def predictor(self) -> Predictor:
        """Return the predictor by `predict_step`."""
        return Predictor(self._backend, self._model)

    def _forms(self) -> Callable[..., Any]:
        """Return what computes a batch as in training, without changing weights."""
        model = self._model

        def forward(batch: Batch, noted: Any = None) -> None:  # outputs, which may be a dict, are no results
            model(batch.inputs, training=True)

        return partial(unapplied, model) if reads_outputs(model) else forward

    def _training_forward(self) -> Any:
        """Return what takes the place of the model's call in training; None: nothing."""
        return recomputed_model(self._model) if self._options.recompute else None

    def _new_evaluator(self) -> KerasEvaluator:
        return KerasEvaluator(
            self._backend,
            self._model,
            rule=lambda: self._rule,
            whole_batch=self._evaluates_whole_batch,
            apart=self._evaluates_apart,
        )

    def _new_logs(self) -> StepLogs:
        return StepLogs(self._backend, self._model, "train_step")

    def _build(self, batch: Batch) -> None:
        """Build a model with Keras' own `train_step`."""
        self._check_targets(batch.targets is not None)
        self.narrow_outputs = narrow(build_from(self._model, keras_data(batch)))
        if not all(layer.built for layer in flatten_layers(self._model)):
            # Called in training only, or by compute_loss: their variables are trained and saved like all others.
            tf.function(self._forms(), autograph=False).get_concrete_function(batch)
        if splits_sequences(self._model):
            outputs = self._model(batch.inputs, training=False)
            check_positions(
                self._model,
                replicas=self._backend,
                targets=batch.targets,
                outputs=outputs,
                ranks=self._backend.axes["cp"],
            )

    def microbatch_length(self, batch: int, slices: int) -> int | None:
        """Return the samples per microbatch; None without accumulation. Raises ConfigError if they are not whole."""
        accumulate, uneven = self._options.accumulate, self._backend.capabilities.uneven
        return per_microbatch(batch, slices, accumulate, uneven=uneven) if accumulate > 1 else None

    def _new_step(self, state: TrainState, rule: UpdateRule, microbatch: int | None) -> CompiledStep:
        whole_batch = self._sees_whole_batch()
        if whole_batch:  # random numbers without a seed of the model's are alike, too
            self._backend.broadcast({"global_seed": global_seed()})
        if self._several:
            exchange = self._exchanging()
            return OptimizersStep(
                self._backend,
                state,
                exchange,
                self._logs,
                rule=rule,
                batch_means=self._takes_means(),
                notes=self._fetch_notes() if whole_batch else None,
            )
        passes = ForwardBackward(
            self._backend,
            state,
            self._logs,
            forward=self._forward,
            jit=self._options.jit,
            parameters=rule.parameters(state.trainable),
            own=has_own_code(self._model),
            batch_means=self._takes_means(),
            whole=self._backend.size == 1 and microbatch is None,
            divisors=rule.divisors,
        )
        if not whole_batch:
            return TrainStep(self._backend, state, passes=passes, logs=self._logs, rule=rule, microbatch=microbatch)
        of_batch = WholeBatchPass(
            self._backend,
            state,
            self._logs,
            forward=self._forward,
            parameters=rule.parameters(state.trainable),
            notes=self._fetch_notes(),
            microbatches=microbatch is not None,
        )
        return TrainStep(
            self._backend, state, passes=of_batch, logs=self._logs, rule=rule, alone=passes, microbatch=microbatch
        )

    def _fetch_notes(self) -> FetchNotes:
        """Return what says once, for all steps of the model, what they fetch."""
        if self._notes is None:
            self._notes = self._new_fetch_notes()
        return self._notes

    def _new_fetch_notes(self) -> FetchNotes:
        own = "train_step" if has_own_train_step(self._model) else "the step"
        parameters = [unwrap(each) for each in self._model.trainable_variables]
        return FetchNotes(
            self._backend, f"{own} of {type(self._model).__name__}", parameters, self._options.explain_step
        )

    def _settle_own_step(self, batch: Batch) -> None:
        """Decide by a trace how the gradients of the model's own `train_step` are exchanged."""
        self._several = not applies_once(self._model, batch, self._logs)
        if not self._several:
            self._exchange = None
            return
        facts = model_facts(job_facts(self._backend), self._model)
        if self._options.whole_batch and self._has_rows and (self._backend.size == 1 or self._sees_whole_batch()):
            facts = replace(facts, sync_layer="")  # its gradients are those of the whole batch, too
        check(self._options, facts=replace(facts, repeated_step=type(self._model).__name__))
        exchange = self._exchanging()

        def step(batch: Batch) -> None:
            samples = number_of_samples(batch)
            whole = samples if self._sees_whole_batch() else None
            self._backend.run(
                lambda: take_step(
                    self._model, batch, samples, exchange=exchange, logs=self._logs, measure=True, whole=whole
                )
            )

        tf.function(step, autograph=False).get_concrete_function(batch)  # builds the optimizers that it uses

    def _exchanging(self) -> OptimizerExchange:
        if self._exchange is None:
            self._exchange = OptimizerExchange(self._backend, self._model, self._options)
        return self._exchange


def _set_optimizer(model: Any, optimizer: Any, objective: Objective) -> None:
    """Set the main optimizer of a model with its own `compile`.

    Raises ConfigError if not compiled, or for losses and metrics that only its `compile` accepts.
    """
    name = type(model).__name__
    signature = f"{name}.compile{inspect.signature(type(model).compile)}".replace("(self, ", "(")
    if not model.compiled:
        if isinstance(innermost(optimizer), NoOptimizer) and objective == Objective(None):
            return
        raise ConfigError(
            f"{name} has a compile() of its own: call it before Trainer(model). Received: a model that is not compiled "
            f"({signature}, which calls super().compile())."
        )
    config = compile_arguments(model)
    for setting, value in vars(objective).items():
        if value and value is not config.get(setting):
            raise ConfigError(
                f"{name} has a compile() of its own, which takes its losses and metrics: leave out {setting} of "
                f"Trainer. Received: {setting}={value!r} ({signature})."
            )
    if isinstance(innermost(optimizer), NoOptimizer):
        return
    if all(innermost(optimizer) is not innermost(each) for each in optimizers_of(model).values()):
        setattr(model, MAIN, optimizer)
