"""Evaluation over all replicas: every sample counts once."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.backends.replicas import ForEachReplica
from hvdtrain.config.errors import DataError
from hvdtrain.data.batch import Batch
from hvdtrain.data.streams.given import in_step
from hvdtrain.parallel.outputs import local_outputs
from hvdtrain.runtime.placement import placement_of
from hvdtrain.state.hashes import checksum
from hvdtrain.state.named_tensors import exchanges_activations, expert_parallel
from hvdtrain.state.structure import structure_of
from hvdtrain.training.objective.losses import LossFunction, with_model_losses
from hvdtrain.training.objective.metrics import Figure, MetricSet, metric_value
from hvdtrain.training.objective.outputs import inputs_for
from hvdtrain.training.step.batches import replica_slice
from hvdtrain.training.update_rules.base import UpdateRule


class EvaluationHooks:
    """Evaluation callbacks, called on every replica with global metrics."""

    def begin_test_step(self, number: int) -> None:
        """Called before batch `number`, from 0."""

    def end_test_step(self, number: int, so_far: Callable[[], Mapping[str, Any]]) -> None:
        """Called after batch `number`, from 0.

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
    """Loss and metrics over a whole data set.

    By name, `outcome["accuracy"]`; in Keras' order, `loss, accuracy = outcome`; the loss alone, `float(outcome)`.
    """

    loss: float | None
    metrics: dict[str, Any]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return loss and metrics by name."""
        return ({} if self.loss is None else {"loss": self.loss}) | self.metrics

    def keys(self) -> Iterable[str]:
        """Return the names, the loss first."""
        return self.as_dict().keys()

    def __getitem__(self, name: str) -> Any:
        return self.as_dict()[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.as_dict().values())

    def __len__(self) -> int:
        return len(self.as_dict())

    def __float__(self) -> float:
        return float("nan") if self.loss is None else self.loss


class Evaluator:
    """Evaluates a model on each replica's data, in fresh metrics.

    `rule` returns the rule that holds the model's weights; None: the model does.
    """

    def __init__(
        self,
        backend: Backend,
        model: Any,
        loss: LossFunction,
        metrics: MetricSet,
        rule: Callable[[], UpdateRule | None] = lambda: None,
    ) -> None:
        self._backend = backend
        self._model = model
        self._loss = loss
        self._metrics = metrics
        self._sums = ForEachReplica(backend, lambda _: tf.Variable(tf.zeros([2], tf.float64), trainable=False))
        self._rule = rule
        # By whether the model holds its weights: a graph gathers them, or does not.
        self._updates = {
            holds: tf.function(self._update_batch, autograph=False, reduce_retracing=True) for holds in (True, False)
        }
        self._reduce = tf.function(lambda: backend.run(self._reduce_all), autograph=False)
        self._look = tf.function(lambda: backend.run(self._look_at_all), autograph=False)

    def __call__(self, batches: Iterable[Batch], hooks: EvaluationHooks | None = None) -> Evaluation:
        """Evaluate on `batches`, equally many on each replica. Raises DataError without samples. Collective."""
        begin = time.perf_counter()
        self._metrics.reset_all()
        for sums in self._sums.all:
            sums.assign(tf.zeros([2], tf.float64))
        hooks, rule = hooks or EvaluationHooks(), self._rule()
        holds = rule is None or rule.holds_weights
        apart = holds and not self._exchanges()
        for number, batch in enumerate(self._backend.distribute(batches if apart else in_step(batches))):
            hooks.begin_test_step(number)
            self._updates[holds](batch)
            hooks.end_test_step(number, self._so_far)
        self._reduce()
        total, weight = self._sums.own.numpy()
        if not weight:
            raise DataError("There is nothing to evaluate: the validation data hold no samples.")
        return Evaluation(float(total / weight), self._metrics.results(), time.perf_counter() - begin)

    def _exchanges(self) -> bool:
        return exchanges_activations(self._model)

    def _so_far(self) -> dict[str, Figure]:
        """Return loss and metrics so far over all replicas. Collective."""
        sums, metrics = self._look()
        total, weight = sums.numpy()
        loss = float(total / weight) if weight else float("nan")
        return {"loss": loss, **{name: metric_value(value) for name, value in metrics.items()}}

    def _look_at_all(self) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        return self._summed("evaluation_so_far/loss"), self._metrics.results_so_far("evaluation_so_far")

    def _update_batch(self, batch: Batch) -> None:
        rule = self._rule()
        with nullcontext() if rule is None else rule.gathered_weights():
            self._backend.run(self._update_replica, batch)

    def _update_replica(self, batch: Batch) -> None:
        batch = replica_slice(batch, self._backend)
        outputs = local_outputs(self._model, self._model, inputs_for(self._model, batch.inputs), training=False)
        part = with_model_losses(self._loss(batch.targets, outputs, batch.sample_weight), self._model)
        share = tf.cast(tf.stack([part.total, part.weight]), tf.float64)
        # A placeholder's loss may be anything: it is excluded, not multiplied by zero.
        self._sums.own.assign_add(tf.where(batch.has_samples > 0, share, tf.zeros_like(share)))
        self._metrics.update(batch.targets, outputs, batch.sample_weight, batch.has_samples)

    def _reduce_all(self) -> None:
        self._sums.own.assign(self._summed("evaluation/loss"))
        self._metrics.reduce("evaluation")

    def _summed(self, name: str) -> tf.Tensor:
        """Return [2], the loss and its weight over all replicas."""
        return self._backend.all_reduce(self._sums.own.read_value(), name=name)
