"""Train and evaluate a model by its own `train_step` and `test_step`."""

import inspect
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import compile_arguments
from hvdtrain.compat.keras_variables import average_of, trained_variables
from hvdtrain.config.errors import ConfigError, DataError, opt
from hvdtrain.data.batch import Batch
from hvdtrain.data.source import Source
from hvdtrain.gradients.distributed_optimizer import DistributedOptimizer, refuse_exchange_of_microbatches
from hvdtrain.layers.exchanging import exchanging_layers
from hvdtrain.layers.sync_batch_norm import sync_layers
from hvdtrain.optim.averaging import has_averages, innermost, replaced_weights
from hvdtrain.runtime.placement import placement_of
from hvdtrain.state.named_tensors import NamedTensor
from hvdtrain.state.optimizers import MAIN, optimizers_of, replicated_slots
from hvdtrain.state.structure import structure_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.assembly import splits_sequences
from hvdtrain.training.evaluation.evaluate import Evaluation, EvaluationHooks
from hvdtrain.training.evaluation.predict import Predictor
from hvdtrain.training.objective.compile_settings import Objective, compile_for_trainer
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.own.exchange import OptimizerExchange
from hvdtrain.training.step.own.logs import StepLogs, plain_values
from hvdtrain.training.step.own.train_step import KerasTrainStep, keras_data, samples_of, take_step
from hvdtrain.training.update_rules.base import UpdateRule
from hvdtrain.training.update_rules.select import DEFAULT, chosen_rule


class KerasEvaluator:
    """Calls the model's `test_step` on every replica's share of the data.

    Metrics are global, and so is the mean of any other returned value. The metrics' training state is preserved.
    """

    def __init__(self, backend: Backend, model: Any) -> None:
        self._backend = backend
        self._model = model
        self._logs = StepLogs(backend, model, "test_step", accumulate=True)
        self._update = tf.function(self._update_batch, autograph=False, reduce_retracing=True)
        self._results = tf.function(lambda: backend.run(self._logs.results, "evaluation"), autograph=False)
        self._look = tf.function(lambda: backend.run(self._logs.results, "evaluation_so_far"), autograph=False)

    def __call__(self, batches: Iterable[Batch], hooks: EvaluationHooks | None = None) -> Evaluation:
        """Evaluate on `batches`, equally many on each replica. Raises DataError without samples. Collective."""
        begin = time.perf_counter()
        kept = [(variable, variable.numpy()) for variable in self._logs.variables()]
        self._logs.reset()
        hooks = hooks or EvaluationHooks()
        count = 0
        for batch in self._backend.distribute(batches):
            hooks.begin_test_step(count)
            self._update(batch)
            hooks.end_test_step(count, self._so_far)
            count += 1
        if not count:
            raise DataError("There is nothing to evaluate: the validation data hold no samples.")
        results = plain_values(self._results())
        self._model.reset_metrics()
        for variable, value in kept:
            variable.assign(value)
        return Evaluation(results.pop("loss", None), results, time.perf_counter() - begin)

    def _so_far(self) -> dict[str, float]:
        return plain_values(self._look())

    def _update_batch(self, batch: Batch) -> None:
        def count() -> tf.Tensor:
            with self._logs.recording():
                returned = self._model.test_step(keras_data(batch))
            self._logs.take(returned, samples_of(batch))
            return tf.constant(True)

        # Traced even without samples: every replica needs the structure of the step's result.
        tf.cond(tf.cast(batch.has_samples, tf.float32) > 0, count, lambda: tf.constant(False))


class OwnStepUpdate(UpdateRule):
    """Owns the state of a model's optimizers, under `optimizer/` and `optimizers/PATH/`.

    An optimizer that the step does not use, such as the default one of `compile()`, has none.
    """

    def __init__(self, backend: Backend, model: Any, optimizers: Mapping[str, Any]) -> None:
        self._optimizers = optimizers
        super().__init__(backend, model, optimizers.get(MAIN, next(iter(optimizers.values()))))

    def named_tensors(self) -> dict[str, NamedTensor]:
        """Return the state of all optimizers by path."""
        structure = structure_of(self.model)
        tensors: dict[str, NamedTensor] = {}
        for path, optimizer in self._optimizers.items():
            if optimizer.built:
                prefix = MAIN if path == MAIN else f"optimizers/{path}"
                tensors |= replicated_slots(optimizer, structure, prefix)
        return tensors

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Swap in each optimizer's EMA of its weights."""
        return self._averages()

    @contextmanager
    def _averages(self) -> Iterator[None]:
        pairs = [pair for optimizer in self._optimizers.values() for pair in _averages_of(optimizer)]
        with replaced_weights([(variable, average) for variable, average in pairs if average is not None]):
            yield

    def _build_optimizer(self) -> None:
        """Build a single optimizer for all trained variables; several are built on first use."""
        if MAIN in self._optimizers and (len(self._optimizers) == 1 or self._optimizers[MAIN].built):
            super()._build_optimizer()


def _averages_of(optimizer: Any) -> list[tuple[Any, Any]]:
    if not has_averages(optimizer):
        return []
    inner = innermost(optimizer)
    return [(variable, average_of(inner, variable)) for variable in trained_variables(inner)]


class KerasStepFactory:
    """Uses the model's own `train_step` and `test_step`; its optimizers reduce gradients.

    Args:
        model: a model that overrides the step of `Model.fit`. One with its own `compile` is compiled.
        optimizer: the new `model.optimizer`, or one of the model's optimizers.
        objective: losses and metrics, as for `Model.compile`.

    Raises:
        ConfigError: an option of hvdtrain's own step, or settings that belong to the model's `compile`.
    """

    def __init__(
        self, backend: Backend, model: Any, optimizer: Any, objective: Objective, options: StepOptions
    ) -> None:
        _refuse_unfit(backend, model, options)
        self._backend = backend
        self._model = model
        self._options = options
        if _compiles_itself(model):
            _set_optimizer(model, optimizer, objective)
        else:
            compile_for_trainer(model, optimizer, objective)
        self._exchange = self._new_exchange()
        self._logs = StepLogs(backend, model, "train_step")
        self._evaluator = KerasEvaluator(backend, model)
        self._step: KerasTrainStep | None = None
        self._composition: Hashable = None
        self._traced = False
        self.narrow_outputs = False

    @property
    def optimizer(self) -> Any:
        """The optimizer with the reported learning rate."""
        return self._exchange.main

    @property
    def has_variables(self) -> bool:
        """Whether all variables exist; those of several optimizers are only known after tracing."""
        return self._traced or bool(self._model.built and list(self._exchange.optimizers) == [MAIN])

    def check(self, source: Source) -> None:
        """No-op: a custom step accepts any data."""

    def build(self, batch: Batch, *, training: bool) -> None:
        """Build model and optimizers by tracing `train_step`, or `test_step` for evaluation alone.

        Only the trace shows which optimizers a step uses, and which variables each trains.
        """
        if self._traced:
            return
        if training:
            self._trace(batch)
        else:
            tf.function(self._model.test_step, autograph=False).get_concrete_function(keras_data(batch))

    def _trace(self, batch: Batch) -> None:
        """Trace the train step, and discard the graph."""

        def step(batch: Batch) -> None:
            self._backend.run(lambda: take_step(self._model, batch, self._exchange, self._logs, measure=True))

        tf.function(step, autograph=False).get_concrete_function(batch)
        self._traced = True

    def _new_exchange(self) -> OptimizerExchange:
        options = self._options
        found = optimizers_of(self._model)
        for optimizer in found.values():
            refuse_exchange_of_microbatches(optimizer, "Trainer")
        distribute = partial(
            DistributedOptimizer,
            op=options.reduce_op,
            compression=options.compression,
            groups=options.gradient_groups,
            sparse_as_dense={"auto": None, "gather": False, "dense": True}[options.sparse_gradients],
            gradient_predivide_factor=options.predivide,
            clip_norm=options.clip_norm,
            clip_value=options.clip_value,
            exchange=self._backend,
        )
        return OptimizerExchange(self._model, found, distribute)

    def update_rule(self) -> UpdateRule:
        """Return the rule that owns the optimizers; the model's step applies gradients."""
        return OwnStepUpdate(self._backend, self._model, self._exchange.optimizers)

    def metric_names(self) -> list[str]:
        """Return the names of the step's results."""
        return self._logs.names

    def train_step(self, state: TrainState, rule: UpdateRule, batch: int, *, epoch_metrics: bool) -> KerasTrainStep:
        """Return the compiled `train_step`."""
        if self._step is None or self._composition != state.composition:
            self._step = KerasTrainStep(self._backend, state, self._exchange, self._logs)
            self._composition = state.composition
        return self._step

    def evaluator(self) -> KerasEvaluator:
        """Return the evaluator by `test_step`."""
        return self._evaluator

    def predictor(self) -> Predictor:
        """Return the predictor."""
        return Predictor(self._backend, self._model)

    def compile_for_callbacks(self) -> None:
        """No-op: the model is already compiled."""


def _refuse_unfit(backend: Backend, model: Any, options: StepOptions) -> None:
    unfit = {
        "accumulate": options.accumulate > 1,
        "jit": options.jit,
        "recompute": options.recompute,
        chosen_rule(options): chosen_rule(options) != DEFAULT,
        f"on_bad_step={options.on_bad_step!r}": options.on_bad_step != "raise",
        "spike_threshold": options.spike_threshold is not None,
        # Gradients of the shared statistics would be weighted by the wrong rank's samples.
        "SyncBatchNormalization": bool(sync_layers(model)),
        # A placeholder's samples would count in other ranks' gradients.
        **{f"{type(layer).__name__} along ep": layer.divided for layer in exchanging_layers(model)},
        # Some gradients are partial on each rank, and the model's step would not sum them.
        f"the axis cp of {opt('parallel')}": splits_sequences(model),
        f"the axis tp of {opt('parallel')}": any(
            "tp" in placed.axes for v in model.variables if (placed := placement_of(v))
        ),
    }
    if backend.capabilities.needs_builders:
        raise ConfigError(
            f"{type(model).__name__} has a step of its own, which {opt('backend', backend.name)} cannot run: use "
            f"{opt('backend', 'horovod')}, or {opt('backend', 'single')}."
        )
    for name, used in unfit.items():
        if used:
            raise ConfigError(
                f"{type(model).__name__} has a step of its own, in which {name} can do nothing: leave it out"
                + (", or use hvdtrain.GradientAccumulator in a loop of your own." if name == "accumulate" else ".")
            )


def _compiles_itself(model: Any) -> bool:
    return type(model).compile is not keras.Model.compile


def _set_optimizer(model: Any, optimizer: Any, objective: Objective) -> None:
    """Set the main optimizer of a model with its own `compile`.

    Raises ConfigError if not compiled, or for losses and metrics that only its `compile` accepts.
    """
    name = type(model).__name__
    signature = f"{name}.compile{inspect.signature(type(model).compile)}".replace("(self, ", "(")
    if not model.compiled:
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
    if all(innermost(optimizer) is not innermost(each) for each in optimizers_of(model).values()):
        setattr(model, MAIN, optimizer)
