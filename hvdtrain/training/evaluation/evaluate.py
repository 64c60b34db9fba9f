"""Evaluation over all replicas: every sample counts once."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.compat.keras import flatten_results
from hvdtrain.compat.tensorflow import compiled
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.batch import Batch
from hvdtrain.data.streams.given import batched, in_step
from hvdtrain.layers.sync_batch_norm import replicas_of, sync_layers
from hvdtrain.partition.tracing import CallsPython, StepExchanges
from hvdtrain.runtime.placement import placement_of
from hvdtrain.state.hashes import checksum
from hvdtrain.state.named_tensors import expert_parallel
from hvdtrain.state.structure import structure_of
from hvdtrain.state.variables import restoring
from hvdtrain.training.step.batches import called, counts_of, keras_data, number_of_samples, replica_slice
from hvdtrain.training.step.forward_backward import called_as
from hvdtrain.training.step.graph_cache import GraphCache
from hvdtrain.training.step.logs import StepLogs, Value, metric_value, where_counted
from hvdtrain.training.step.looped import Loop, kind_of_steps, of_one_kind
from hvdtrain.training.step.loss_terms import LossTerms
from hvdtrain.training.step.traced import traced_anew
from hvdtrain.training.step.whole_batch import opened, samples_of_batch, settled_results
from hvdtrain.training.update_rules.base import UpdateRule


class EvaluationHooks:
    """Evaluation callbacks, called on every replica with global metrics."""

    swaps = False
    """Whether the EMA of the weights is evaluated, in place of the weights (Keras' SwapEMAWeights)."""

    def begin_test_step(self, number: int) -> None:
        """Called before batch `number`, from 0, or the first of several that are computed in one call."""

    def end_test_step(self, number: int, so_far: Callable[[], Mapping[str, Any]]) -> None:
        """Called after batch `number`, from 0, or the last of several, as if there were as many in each call.

        `so_far` returns loss and metrics so far. It is a collective: all replicas call it, or none.
        """


WEIGHTS = "model/"
"""Path prefix of the model's weights."""


def weights_of(model: Any, rule: UpdateRule | None = None) -> dict[str, tf.Variable]:
    """Return weights by structural path, and the replicated tensors of `rule`."""
    weights = {f"{WEIGHTS}{path}": v for path, v in structure_of(model).by_path(model.weights).items()}
    tensors = {} if rule is None else rule.named_tensors()
    return weights | {path: tensor.value for path, tensor in tensors.items() if tensor.replicated}


def broadcast_first_weights(tensors: Mapping[str, tf.Variable], backend: Backend) -> bool:
    """Broadcast rank 0's values if ranks differ; return whether they did. Collective.

    A user may have loaded weights on rank 0 only, or each rank may have initialized its own. Expert-parallel shards are
    broadcast from the first rank that holds the same shard. Every rank passes the same paths.
    """
    along_tp = _broadcast_along_tp(tensors, backend)
    if backend.size == backend.local_size:
        return along_tp
    held = expert_parallel(tensors)
    shared = {path: tensor for path, tensor in tensors.items() if path not in held}
    mine = [checksum(each) for each in (shared, held)]
    # No timeout of its own: a rank may still be loading data.
    everyone = gather(backend, mine, timeout=None, among="replicas")
    parts = backend.along("ep").size if held else 1
    if all(theirs == [everyone[0][0], everyone[rank % parts][1]] for rank, theirs in enumerate(everyone)):
        return along_tp
    backend.broadcast(shared)
    if held:
        backend.broadcast(held, among="holders")
    return True


def _broadcast_along_tp(tensors: Mapping[str, tf.Variable], backend: Backend) -> bool:
    """Broadcast full weights along tp if they differ."""
    if backend.axes.get("tp", 1) == 1:
        return False
    # Not for optimizer slots, whose variables may be sharded.
    placements = {path: placement_of(tensor) for path, tensor in tensors.items() if path.startswith(WEIGHTS)}
    whole = {path: tensors[path] for path, placed in placements.items() if placed is None or "tp" not in placed.axes}
    if len(set(gather(backend, checksum(whole), timeout=None, among="tp"))) == 1:
        return False
    backend.broadcast(whole, among="tp")
    return True


@dataclass(frozen=True)
class Evaluation:
    """Loss and metrics over a whole data set, in the order in which the model reports them."""

    loss: float | None
    metrics: dict[str, Any]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return loss and metrics by name."""
        return ({} if self.loss is None else {"loss": self.loss}) | self.metrics


def as_keras_returns(model: Any, results: Mapping[str, Any]) -> Any:
    """Return results by name as Keras returns them: a number, or a list of several."""
    values = flatten_results(model, dict(results))
    return values if isinstance(values, float) else list(tf.nest.flatten(values))


def evaluation_of(results: Mapping[str, Value], seconds: float) -> Evaluation:
    """Return an evaluation of these results."""
    loss = results.get("loss")
    return Evaluation(
        loss=None if loss is None else float(loss),
        metrics={name: value for name, value in results.items() if name != "loss"},
        seconds=seconds,
    )


def is_stopped(model: Any, attribute: str, ranks: int) -> bool:
    """Return whether a callback has ended the pass over the data. Raises ConfigError where several ranks share it."""
    if not getattr(model, attribute):
        return False
    if ranks > 1:
        raise ConfigError(
            f"A callback set model.{attribute}, which ends the pass over the data in one process; {ranks} ranks go "
            "through it together. Pass steps=N in its place."
        )
    return True


class KerasEvaluator:
    """Calls the model's `test_step` on every replica's share of the data.

    Metrics are over all batches and replicas, and any other returned value is of the last batch, over all replicas. The
    model's metrics are reset before, and hold the sums of the evaluation after it, as in Keras.

    `rule` returns the rule that holds the model's weights; None: the model does. `logs` counts the results.
    `whole_batch` returns whether code of the model's own computes with the samples of all replicas; a Python function
    is called with this one's if `apart` allows it.

    The batches of a call, `steps_per_execution` of the model, are one for the hooks.
    """

    of_stage: ClassVar[bool] = False
    """Whether the model is a pipeline's stage, whose outputs may be shards of the whole model's."""

    def __init__(
        self,
        backend: Backend,
        model: Any,
        rule: Callable[[], UpdateRule | None] = lambda: None,
        logs: type[StepLogs] = StepLogs,
        *,
        whole_batch: Callable[[], bool] = lambda: False,
        apart: Callable[[], bool] = lambda: False,
    ) -> None:
        self._backend = backend
        self._loops = GraphCache()
        self._sees_whole_batch = whole_batch
        self._may_be_apart = apart
        self._apart = False
        self._model = model
        self._rule = rule
        self.batch_means = True
        """Whether a loss that is one number for a batch is taken for a mean over its samples."""
        self._logs = logs(backend, model, "test_step")
        # By whether the model holds its weights: a graph gathers them, or does not.
        self._updates = {holds: compiled(self._update_batch, reduce_retracing=True) for holds in (True, False)}
        keep = backend.local_size == 1
        self._results = compiled(
            lambda: where_counted(backend, lambda: self._logs.results("evaluation", keep=keep)).of_epoch
        )
        self._look = compiled(lambda: where_counted(backend, lambda: self._logs.results("evaluation_so_far")).of_step)

    def __call__(self, batches: Iterable[Batch], hooks: EvaluationHooks | None = None) -> Evaluation:
        """Evaluate on `batches`, equally many on each replica. Raises DataError without samples. Collective."""
        begin = time.perf_counter()
        self._logs.reset()
        hooks, rule = hooks or EvaluationHooks(), self._rule()
        holds = rule is None or rule.gathering() is None
        count, self._model.stop_evaluating = 0, False
        # Ranks exchange divisors of losses, parameters and activations in each batch.
        at_once = self._model.steps_per_execution
        for together in batched(in_step(batches), at_once):
            hooks.begin_test_step(count)
            for alike in of_one_kind(together):
                try:
                    self._update(alike, holds=holds)
                except (StepExchanges, CallsPython) as error:  # while it was traced
                    if isinstance(error, CallsPython) and not self._may_be_apart():
                        raise
                    self._apart = True
                    self._update(alike, holds=holds)
            hooks.end_test_step(count + at_once - 1, self._so_far)
            count += len(together)
            if is_stopped(self._model, "stop_evaluating", self._backend.job_size):
                break
        if not count:
            raise DataError("There is nothing to evaluate: the validation data hold no samples.")
        results = {name: metric_value(value) for name, value in self._results().items()}
        return evaluation_of(results, time.perf_counter() - begin)

    def _update(self, batches: Sequence[Batch], *, holds: bool) -> None:
        """Count batches of one kind, in one call if there is a graph for so many kinds."""
        update, first = self._updates[holds], batches[0]
        kind = (holds, self._apart, kind_of_steps(first))
        loop = self._loops.find(kind, lambda: Loop(update, first)) if len(batches) > 1 else None
        if loop is not None:
            loop(batches)
            return
        for batch in batches:
            called(update, batch)

    def kept_metrics(self) -> AbstractContextManager[None]:
        """Return a context that restores what the model's metrics hold: the epoch so far of a training under way."""
        return restoring(self._logs.variables())

    def _so_far(self) -> dict[str, Value]:
        return {name: metric_value(value) for name, value in self._look().items()}

    def _update_batch(self, batch: Batch) -> None:
        rule = self._rule()
        with (None if rule is None else rule.gathering()) or nullcontext():
            self._backend.run(self._update_replica, batch)

    def _update_replica(self, batch: Batch) -> None:
        batch = replica_slice(batch, self._backend)
        if self._sees_whole_batch() and not self._apart:
            self._update_whole_batch(batch, number_of_samples(batch))
            return
        samples, total = counts_of(batch, self._backend.data_parallel)
        terms = LossTerms(
            model=self._model,
            collectives=self._backend,
            samples=samples / self._backend.axes.get("cp", 1),
            total=total,
            whole=self._backend.size == 1,
            divisors="exchanged",
            batch_means=self.batch_means,
            of_stage=self.of_stage,
        )
        with (
            self._logs.counting(batch.has_samples),
            terms.corrected(),
            self._logs.recording(),
            called_as(self._model),
        ):
            returned = self.step_on(batch)
        self._logs.take(returned, number_of_samples(batch))

    def _update_whole_batch(self, batch: Batch, samples: tf.Tensor) -> None:
        with (
            replicas_of(sync_layers(self._model), self._backend, batch.has_samples),
            opened(batch, self._backend, self._logs) as (rows, partition),
            self._logs.recording(),
            called_as(self._model),
        ):
            partition.cause = "the results of the step"
            returned = settled_results(partition, self._logs, self._model.test_step(keras_data(rows)))
        self._logs.take(returned, samples, whole=samples_of_batch(batch, partition))

    def step_on(self, batch: Batch) -> Any:
        """Return the results of a batch."""
        with traced_anew():
            return self._model.test_step(keras_data(batch))
