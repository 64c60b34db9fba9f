"""Train and evaluate a model by a `train_step` and a `test_step` of its own."""

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
from hvdtrain.state.named_tensors import NamedTensor
from hvdtrain.state.optimizers import MAIN, optimizers_of
from hvdtrain.state.placement import placement_of
from hvdtrain.state.slots import replicated_slots
from hvdtrain.state.structure import structure_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.assembly import splits_sequences
from hvdtrain.training.evaluation.evaluate import Evaluation, EvaluationHooks
from hvdtrain.training.evaluation.predict import Predictor
from hvdtrain.training.objective.compile_settings import Objective, compile_for_trainer
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.own.exchange import OptimizerExchange
from hvdtrain.training.step.own.logs import StepLogs, plain_figures
from hvdtrain.training.step.own.train_step import KerasTrainStep, keras_data, samples_of, take_step
from hvdtrain.training.update_rules.base import UpdateRule
from hvdtrain.training.update_rules.select import DEFAULT, chosen_rule


class KerasEvaluator:
    """Calls the model's `test_step` on every replica's part of the data.

    Metrics are over all samples, and so is the mean of anything else that it returns. What the model's metrics have
    counted in training is kept.
    """

    def __init__(self, backend: Backend, model: Any) -> None:
        self._backend = backend
        self._model = model
        self._logs = StepLogs(backend, model, "test_step", accumulate=True)
        self._update = tf.function(self._update_batch, autograph=False, reduce_retracing=True)
        self._results = tf.function(lambda: backend.run(self._logs.results, "evaluation"), autograph=False)
        self._look = tf.function(lambda: backend.run(self._logs.results, "evaluation_so_far"), autograph=False)

    def __call__(self, batches: Iterable[Batch], hooks: EvaluationHooks | None = None) -> Evaluation:
        """Evaluate on `batches`, of which each replica must have the same number; `hooks` may look in.

        Raises:
            DataError: there is nothing to evaluate.
        """
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
        results = plain_figures(self._results())
        self._model.reset_metrics()
        for variable, value in kept:
            variable.assign(value)
        return Evaluation(results.pop("loss", None), results, time.perf_counter() - begin)

    def _so_far(self) -> dict[str, float]:
        return plain_figures(self._look())

    def _update_batch(self, batch: Batch) -> None:
        def count() -> tf.Tensor:
            with self._logs.recording():
                returned = self._model.test_step(keras_data(batch))
            self._logs.take(returned, samples_of(batch))
            return tf.constant(True)

        # Traced without samples too: every replica has to know what the step returns.
        tf.cond(tf.cast(batch.has_samples, tf.float32) > 0, count, lambda: tf.constant(False))


class OwnStepUpdate(UpdateRule):
    """Owns the slots of a model's optimizers, under `optimizer/` and, of others, `optimizers/PATH/`.

    An optimizer that the step does not use, such as the one that `compile()` makes where it is given none, has none.

    Args:
        backend: the replicas.
        model: the built model.
        optimizers: its optimizers by path.
    """

    def __init__(self, backend: Backend, model: Any, optimizers: Mapping[str, Any]) -> None:
        self._optimizers = optimizers
        super().__init__(backend, model, optimizers.get(MAIN, next(iter(optimizers.values()))))

    def named_tensors(self) -> dict[str, NamedTensor]:
        """See `UpdateRule`."""
        structure = structure_of(self.model)
        tensors: dict[str, NamedTensor] = {}
        for path, optimizer in self._optimizers.items():
            if optimizer.built:
                prefix = MAIN if path == MAIN else f"optimizers/{path}"
                tensors |= replicated_slots(optimizer, structure, prefix)
        return tensors

    def averaged_weights(self) -> AbstractContextManager[None]:
        """See `UpdateRule`: the averages of each optimizer, of the weights that it trains."""
        return self._averages()

    @contextmanager
    def _averages(self) -> Iterator[None]:
        pairs = [pair for optimizer in self._optimizers.values() for pair in _averages_of(optimizer)]
        with replaced_weights([(variable, average) for variable, average in pairs if average is not None]):
            yield

    def _build_optimizer(self) -> None:
        """Build the only optimizer for all that is trained; of several each is built where the step first uses it."""
        if MAIN in self._optimizers and (len(self._optimizers) == 1 or self._optimizers[MAIN].built):
            super()._build_optimizer()


def _averages_of(optimizer: Any) -> list[tuple[Any, Any]]:
    if not has_averages(optimizer):
        return []
    inner = innermost(optimizer)
    return [(variable, average_of(inner, variable)) for variable in trained_variables(inner)]


class KerasStepFactory:
    """The model's own `train_step` and `test_step`; its optimizers exchange gradients.

    Args:
        backend: the replicas.
        model: a model that replaces what `Model.fit` does in a step. One with a `compile` of its own is compiled.
        optimizer: what `model.optimizer` is to be, or one of the optimizers that the model holds.
        objective: losses and metrics, as `Model.compile` takes them.
        options: of the step.

    Raises:
        ConfigError: an option that only hvdtrain's own step has, or settings that belong to the model's `compile`.
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
        """See `StepFactory`."""
        return self._exchange.main

    @property
    def has_variables(self) -> bool:
        """See `StepFactory`: several optimizers show what they train where the step is traced."""
        return self._traced or bool(self._model.built and list(self._exchange.optimizers) == [MAIN])

    def check(self, source: Source) -> None:
        """See `StepFactory`. No check: a custom step accepts anything."""

    def build(self, batch: Batch, *, training: bool) -> None:
        """Create the variables of model and optimizers by tracing `train_step`; for evaluation alone, by `test_step`.

        Which optimizers a step uses, and which variables each of them trains, shows in its trace alone.
        """
        if self._traced:
            return
        if training:
            self._trace(batch)
        else:
            tf.function(self._model.test_step, autograph=False).get_concrete_function(keras_data(batch))

    def _trace(self, batch: Batch) -> None:
        """Trace the train step, and throw the graph away."""

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
        """See `StepFactory`: the model's own step applies gradients, through optimizers that exchange them."""
        return OwnStepUpdate(self._backend, self._model, self._exchange.optimizers)

    def metric_names(self) -> list[str]:
        """See `StepFactory`: those that the step returns."""
        return self._logs.names

    def train_step(self, state: TrainState, rule: UpdateRule, batch: int, *, epoch_metrics: bool) -> KerasTrainStep:
        """See `StepFactory`."""
        if self._step is None or self._composition != state.composition:
            self._step = KerasTrainStep(self._backend, state, self._exchange, self._logs)
            self._composition = state.composition
        return self._step

    def evaluator(self) -> KerasEvaluator:
        """See `StepFactory`."""
        return self._evaluator

    def predictor(self) -> Predictor:
        """See `StepFactory`."""
        return Predictor(self._backend, self._model)

    def compile_for_callbacks(self) -> None:
        """See `StepFactory`: the model is compiled already."""


def _refuse_unfit(backend: Backend, model: Any, options: StepOptions) -> None:
    unfit = {
        "accumulate": options.accumulate > 1,
        "jit": options.jit,
        "recompute": options.recompute,
        chosen_rule(options): chosen_rule(options) != DEFAULT,
        f"on_bad_step={options.on_bad_step!r}": options.on_bad_step != "raise",
        "spike_threshold": options.spike_threshold is not None,
        # The gradients that ranks owe one another would count by the samples of the wrong rank.
        "SyncBatchNormalization": bool(sync_layers(model)),
        # Samples that a rank holds in place of its own would count in the others' gradients.
        **{f"{type(layer).__name__} along ep": layer.divided for layer in exchanging_layers(model)},
        # Of some gradients each rank has a part, which its step would not add up.
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
    """Give a model with a `compile` of its own another main optimizer, if it is none of those that it holds.

    Raises:
        ConfigError: it was not compiled, or losses and metrics that only its `compile` can take.
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
