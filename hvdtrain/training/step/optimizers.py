"""Models whose `train_step` applies gradients several times, or reads what it has updated.

Their optimizers exchange the gradients as they are applied.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras_variables import average_of, trained_variables
from hvdtrain.compat.seams import APPLY
from hvdtrain.compat.tensorflow import eager_variables
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import Batch
from hvdtrain.gradients.distributed_optimizer import DistributedOptimizer
from hvdtrain.layers.sync_batch_norm import replicas_of, sync_layers
from hvdtrain.optim.averaging import has_averages, innermost, replaced_weights
from hvdtrain.optim.clipping import ordered_sum
from hvdtrain.partition.partition import Partition
from hvdtrain.state.named_tensors import NamedTensor
from hvdtrain.state.optimizers import MAIN, optimizers_of, replicated_slots
from hvdtrain.state.structure import structure_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.state.variables import as_written, path_of, unwrap
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.batches import applies_nothing, counts_of, number_of_samples, take_train_step
from hvdtrain.training.step.fetch_notes import FetchNotes
from hvdtrain.training.step.finite import zero_if_finite
from hvdtrain.training.step.logs import StepLogs
from hvdtrain.training.step.loss_terms import LossTerms, trained_ids
from hvdtrain.training.step.placeholder import kept_statistics, updated_statistics
from hvdtrain.training.step.traced import offset_seeds
from hvdtrain.training.step.train_step import ReplicaStep
from hvdtrain.training.step.whole_batch import (
    as_applied,
    opened,
    samples_of_batch,
    settled_results,
    units_statistics,
)
from hvdtrain.training.step.whole_batch import take_train_step as step_of
from hvdtrain.training.update_rules.base import UpdateRule


class OptimizerExchange:
    """Reduces the gradients that a model's step passes to its optimizers.

    Inside `exchanging`, `apply` of each optimizer takes this replica's gradients and applies the reduced ones, and any
    other optimizer raises when used by the tracing thread.
    """

    def __init__(self, backend: Backend, model: Any, options: StepOptions) -> None:
        self.optimizers = optimizers_of(model)
        self.used: list[str] = []
        """Paths of the optimizers used by the step, in the order of first use."""
        self._model = model
        self._distributed = {path: _distributed(each, backend, options) for path, each in self.optimizers.items()}
        # Variables, since a step may apply gradients in its own loop, condition or tf.function, which cannot read
        # another graph's tensors.
        self._weight = tf.Variable(0.0, trainable=False, name="local_weight")
        self._norms = {path: tf.Variable(0.0, trainable=False, name="gradient_norm") for path in self.optimizers}
        self._measure = False
        self._applying = False
        self._partition: Partition | None = None
        self._calls: dict[str, int] = {}

    @property
    def main(self) -> Any:
        """The optimizer with the reported learning rate: `model.optimizer`, or the first one used."""
        path = MAIN if MAIN in self.used or not self.used else self.used[0]
        return self.optimizers.get(path, next(iter(self.optimizers.values())))

    @contextmanager
    def exchanging(self, weight: tf.Tensor, *, measure: bool, partition: Partition | None = None) -> Iterator[None]:
        """Reduce gradients applied inside the context, weighted by `weight` (such as samples).

        `measure` says whether `norm` will be used, which costs a pass; `partition` how gradients of the whole batch are
        held, which have no weight.
        """
        self._partition = partition
        self._weight.assign(tf.cast(weight, tf.float32))
        self._measure, self._calls = measure, {}
        with ExitStack() as stack:
            stack.enter_context(APPLY.replaced(keras.optimizers.Optimizer, self._elsewhere()))
            for path, optimizer in self.optimizers.items():
                stack.enter_context(APPLY.replaced(optimizer, partial(self._apply, path)))
            yield

    def norm(self) -> tf.Tensor:
        """Return the L2 norm of the last reduced gradients, before clipping."""
        return tf.sqrt(ordered_sum([tf.square(self._norms[path].read_value()) for path in self.used]))

    @as_written
    def _apply(self, path: str, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        optimizer = self.optimizers[path]
        if self._applying:
            type(optimizer).apply(optimizer, grads, trainable_variables)
            return
        known = trained_variables(innermost(optimizer))
        variables = list(known if trainable_variables is None else trainable_variables)
        if not variables:
            return
        self._check_owner(path, variables)
        self._build(optimizer, variables)
        distributed = self._distributed[path]
        distributed.role = self._role(path)
        self._applying = True
        try:
            if self._partition is None:
                distributed.local_weight = self._weight
                distributed.apply(list(grads), variables)
            else:
                self._apply_of_batch(self._partition, distributed, grads, variables)
        finally:
            self._applying = False
        if self._measure:
            self._norms[path].assign(tf.cast(distributed.norm, tf.float32))
        if path not in self.used:
            self.used.append(path)

    def _apply_of_batch(
        self, partition: Partition, distributed: DistributedOptimizer, grads: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        """Apply gradients of the whole batch, which are added up unless the step's own code did so."""
        partition.cause = "the gradients"
        distributed.local_weight = None
        given, is_whole = as_applied(partition, list(grads))
        with partition.plain():
            if is_whole:
                distributed.apply_reduced(given, variables)
            else:
                distributed.apply(given, variables)

    def _build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build an optimizer as Keras does: `model.optimizer` for all trained variables, others for their own."""
        if not optimizer.built:
            with eager_variables():
                everything = optimizer is getattr(self._model, MAIN, None)
                optimizer.build(self._model.trainable_variables if everything else variables)

    def _role(self, path: str) -> str:
        """Return a unique name for this reduction within the step."""
        count = self._calls.get(path, 0)
        self._calls[path] = count + 1
        role = "gradient" if path == MAIN else f"gradient/{path}"
        return f"{role}/{count}" if count else role

    def _check_owner(self, path: str, variables: Sequence[Any]) -> None:
        """Reject variables outside the model: they would not be broadcast, compared or saved."""
        own = structure_of(self._model).paths
        for variable in variables:
            if id(unwrap(variable)) not in own:
                raise ConfigError(
                    f"self.{path.replace('/', '.')} of {type(self._model).__name__} trains a variable that is not the "
                    f"model's: every rank would begin with its own value. Received: {path_of(variable)!r}. Make it a "
                    "weight of the model, with add_weight(), or of a layer that is an attribute of the model."
                )

    def _elsewhere(self) -> Callable[..., Any]:
        """Return an `apply` for all other optimizers."""
        original = keras.optimizers.Optimizer.apply

        @as_written
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if self._applying:
                return original(optimizer, grads, trainable_variables)
            raise stranger(self._model, optimizer)

        return apply


def stranger(model: Any, optimizer: Any) -> ConfigError:
    """Return the error of a `train_step` that uses an optimizer that is none of the model's."""
    known = ", ".join(f"self.{path.replace('/', '.')}" for path in optimizers_of(model))
    return ConfigError(
        f"train_step of {type(model).__name__} applies gradients with an optimizer that is no attribute of the model, "
        f"so that they would not be exchanged and the ranks would drift apart. Received: {type(optimizer).__name__} "
        f"{optimizer.name!r}; the model holds {known}. Keep it in an attribute, set in __init__() or compile()."
    )


class OptimizersStep(ReplicaStep):
    """A step whose optimizers exchange gradients as they apply them, weighted by samples.

    With `notes`, which say what it fetches, it computes with the whole batch. Else `batch_means` says whether a loss
    that is one number for a batch is taken for a mean over its samples.
    """

    def __init__(
        self,
        backend: Backend,
        state: TrainState,
        exchange: OptimizerExchange,
        logs: StepLogs,
        rule: UpdateRule,
        *,
        batch_means: bool = False,
        notes: FetchNotes | None = None,
    ) -> None:
        super().__init__(backend, state, logs, rule, whole_batch=notes is not None)
        self._notes = notes
        self._batch_means = batch_means
        self._exchange = exchange

    def _updated(self, batch: Batch, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None, None]:
        """Call the model's `train_step`; there is no guard."""
        model, exchange = self._state.model, self._exchange
        if self._whole_batch:
            with kept_statistics(units_statistics(model), batch, synchronized=sync_layers(model)):
                watched = self._taken_of_batch(batch, measure=measure)
            totals = self._totals(batch, watched, number_of_samples(batch))
            return totals, exchange.norm() if measure else None, None
        samples, total = counts_of(batch, self._backend.data_parallel)
        terms = LossTerms(
            model=model,
            collectives=self._backend,
            samples=samples,
            total=total,
            whole=self._backend.size == 1,
            divisors="exchanged",
            batch_means=self._batch_means,
        )
        with offset_seeds(self._backend.index), terms.corrected():
            watched = take_step(model, batch, samples, exchange=exchange, logs=self._logs, measure=measure)
        return self._totals(batch, watched, samples), exchange.norm() if measure else None, None

    def _taken_of_batch(self, batch: Batch, *, measure: bool) -> list[tf.Tensor]:
        """Call the model's `train_step` on a replica's rows of the batch; return parts of values that must be finite.

        Raises ConfigError if it trains nothing, or returns invalid results.
        """
        model, exchange, logs = self._state.model, self._exchange, self._logs
        with (
            replicas_of(sync_layers(model), self._backend, batch.has_samples),
            opened(batch, self._backend, logs) as (rows, partition),
            exchange.exchanging(number_of_samples(batch), measure=measure, partition=partition),
            logs.recording(),
        ):
            returned = step_of(model, rows)
            partition.cause = "the results of the step"
            returned = settled_results(partition, logs, returned)
        if not exchange.used:
            raise applies_nothing(model)
        if self._notes is not None:
            self._notes.note(partition, batch)
        return logs.take(returned, number_of_samples(batch), whole=samples_of_batch(batch, partition))

    def _totals(self, batch: Batch, watched: list[tf.Tensor], samples: tf.Tensor) -> tf.Tensor:
        """Return [0 or NaN, 0, 0 or NaN] over all replicas: finiteness of results and data; no loss."""
        poison = zero_if_finite(tf.nest.flatten((batch.inputs, batch.targets), expand_composites=True))
        local = tf.stack([zero_if_finite(watched), tf.constant(0.0), poison])
        return self._backend.all_reduce(tf.where(samples > 0, local, tf.zeros_like(local)), name="own_step//totals")


def take_step(
    model: Any,
    batch: Batch,
    samples: tf.Tensor,
    exchange: OptimizerExchange,
    logs: StepLogs,
    *,
    measure: bool,
    whole: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Call the model's `train_step` on a replica's batch, which weighs `samples`; return values that must be finite.

    Of results that are those of a `whole` batch, see `StepLogs.take`.

    Raises ConfigError if it trains nothing, or returns invalid results.
    """
    with (
        exchange.exchanging(samples, measure=measure),
        logs.recording(),
        logs.counting(batch.has_samples),
        kept_statistics(updated_statistics(model), batch),
    ):
        returned = take_train_step(model, batch)
    if not exchange.used:
        raise applies_nothing(model)
    return logs.take(returned, samples, whole=whole)


class OptimizersUpdate(UpdateRule):
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

    def finalize(self) -> None:
        """Replace the weights by the EMA of `model.optimizer`, if any, as Keras does after a training."""
        for variable, average in _averages_of(self._optimizers[MAIN]) if MAIN in self._optimizers else []:
            if average is not None:
                variable.assign(average)

    def _build_optimizer(self) -> None:
        """Build a single optimizer for all trained variables; several are built on first use."""
        if MAIN in self._optimizers and (len(self._optimizers) == 1 or self._optimizers[MAIN].built):
            super()._build_optimizer()


def _averages_of(optimizer: Any) -> list[tuple[Any, Any]]:
    if not has_averages(optimizer):
        return []
    inner = innermost(optimizer)
    return [(variable, average_of(inner, variable)) for variable in trained_variables(inner)]


def applies_once(model: Any, batch: Batch, logs: StepLogs) -> bool:
    """Return whether a `train_step` applies gradients once, with `self.optimizer`, and reads no updated variable.

    Its gradients can then be taken out of it, and be applied by an update rule. The step is traced without applying
    anything; the graph is discarded. Raises ConfigError if it applies nothing.
    """
    places: list[int] = []
    known = {id(each) for found in optimizers_of(model).values() for each in (found, innermost(found))}

    @as_written
    def elsewhere(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        if id(optimizer) not in known:
            raise stranger(model, optimizer)
        places.append(-1)

    def step(batch: Batch) -> None:
        graph = tf.compat.v1.get_default_graph()
        places.clear()  # TensorFlow traces again where variables were made

        @as_written
        def apply(grads: Any, trainable_variables: Any = None) -> None:
            places.append(_place(graph))
            if not trained_ids(model).issuperset(id(unwrap(variable)) for variable in trainable_variables or ()):
                places.append(-1)

        with ExitStack() as stack:
            stack.enter_context(APPLY.replaced(keras.optimizers.Optimizer, elsewhere))
            if model.optimizer is not None:
                stack.enter_context(APPLY.replaced(model.optimizer, apply))
            stack.enter_context(logs.recording())
            samples = number_of_samples(batch)
            logs.take(take_train_step(model, batch), samples, whole=samples)

    graph = tf.function(step, autograph=False).get_concrete_function(batch).graph
    if not places:
        raise applies_nothing(model)
    if len(places) != 1 or places[0] < 0:
        return False
    handles = {id(unwrap(variable).handle) for variable in model.trainable_variables}
    captured = {id(inner) for outer, inner in graph.captures if id(outer) in handles}
    later = graph.get_operations()[places[0] :]
    return not any(id(tensor) in captured for operation in later for tensor in operation.inputs)


def unapplied(model: Any, batch: Batch) -> Any:
    """Return the result of a `train_step` whose optimizers apply nothing."""

    @as_written
    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        pass

    with APPLY.replaced(keras.optimizers.Optimizer, apply):
        return take_train_step(model, batch)


def _place(graph: Any) -> int:
    """Return the number of operations in `graph`; -1 within a loop, a branch or a function of it."""
    inside = tf.compat.v1.get_default_graph() is graph
    return len(graph.get_operations()) if inside else -1


def _distributed(optimizer: Any, backend: Backend, options: StepOptions) -> DistributedOptimizer:
    return DistributedOptimizer(
        optimizer,
        op=options.reduce_op,
        compression=options.compression,
        groups=options.gradient_groups,
        sparse_as_dense={"auto": None, "gather": False, "dense": True}[options.sparse_gradients],
        gradient_predivide_factor=options.predivide,
        clip_norm=options.clip_norm,
        clip_value=options.clip_value,
        exchange=backend,
    )
