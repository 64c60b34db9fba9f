"""One optimizer step as one compiled function: forward, backward, reduction, update."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives
from hvdtrain.compat.keras_variables import reading_rows
from hvdtrain.data.batch import Batch
from hvdtrain.gradients.gradient_sum import GradientSum
from hvdtrain.layers.experts import MixtureOfExperts, expert_layers, routing_metrics
from hvdtrain.optim.precision import has_dynamic_scale, loss_scale_of
from hvdtrain.partition.tracing import StepExchanges
from hvdtrain.state.optimizers import rate_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.step.batches import Microbatches, called, parts_of, replica_slice
from hvdtrain.training.step.contract import LocalGradients, Measured, StepResult
from hvdtrain.training.step.graph_cache import GraphCache, kind_of
from hvdtrain.training.step.guard import VariableSnapshot, untrained_variables
from hvdtrain.training.step.logs import EpochMetrics, Results, StepLogs
from hvdtrain.training.step.looped import Loop, kind_of_steps, of_one_kind
from hvdtrain.training.update_rules.base import UpdateRule

T = TypeVar("T")


class Passes(Protocol):
    """Computes a replica's gradients of a microbatch."""

    def __call__(self, batch: Batch, *, first: bool = True) -> LocalGradients:
        """Run a microbatch, the `first` of its step or another."""

    def report_loss(self, batch: Batch, loss: tf.Tensor) -> None:
        """Report the loss of a step over all replicas, if it was not known to a pass."""


class ReplicaStep(EpochMetrics):
    """The compiled step of one replica; base of steps that differ in who applies the gradients.

    Reports what the model's `train_step` returns, as Keras does: its metrics count over an epoch, any other value is
    that of the last batch.

    Args:
        logs: the results of the model's `train_step`.
        counts: whether this process sees the outputs; exactly one process of a replica does.
        experts: expert layers with routing metrics; default: the model's.
        figures: sums these metrics; default: the replicas.
        whole_batch: whether the step computes with the whole batch, whose random numbers are alike on all replicas.
    """

    def __init__(
        self,
        backend: Backend,
        state: TrainState,
        logs: StepLogs,
        rule: UpdateRule,
        *,
        counts: bool = True,
        experts: Sequence[MixtureOfExperts] | None = None,
        figures: Collectives | None = None,
        whole_batch: bool = False,
    ) -> None:
        super().__init__(backend, logs, counts=counts)
        self._state = state
        self._rule = rule
        self._expert_layers = expert_layers(state.model) if experts is None else experts
        self._figures = figures or backend
        self._whole_batch = whole_batch
        # Two graphs, with and without measurement: a condition in one graph costs 5 % of a small step.
        self._general = {
            measure: tf.function(partial(self._run, measure=measure), autograph=False, reduce_retracing=True)
            for measure in (False, True)
        }
        # So does a dynamic batch size; a whole Batch as the argument costs another 5 %, and finding the graph for the
        # arguments 2 %: each kind of batch gets its own graph instead.
        self._special = GraphCache()

    def __call__(self, batch: Batch, *, measure: bool) -> StepResult:
        """Train on `batch`; `measure` fills `Measured`. Collective."""
        return self._traced(lambda: self._taken(lambda: self._step_for(batch, measure)(batch)))

    def several(self, batches: Sequence[Batch], *, measure: bool) -> list[StepResult]:
        """Train on each of the batches in turn, on those of one kind in one call; `measure` is of the last. Collective.

        The results of a call are stacked: [steps, …].
        """
        ahead = batches[:-1] if measure else batches
        results = [each for alike in of_one_kind(ahead) for each in self._looped(alike)]
        return [*results, self(batches[-1], measure=True)] if measure else results

    def _looped(self, batches: Sequence[Batch]) -> list[StepResult]:
        """Train on batches of one kind; one by one if the rule is asked after each, or there are too many kinds."""
        several = len(batches) > 1 and not self._rule.acts_between_steps
        loop = self._traced(lambda: self._loop_for(batches[0])) if several else None
        if loop is None:
            return [self(batch, measure=False) for batch in batches]
        return [self._taken(lambda: loop(batches))]

    def _traced(self, trace: Callable[[], T]) -> T:
        """Return what `trace` returns, which may trace a step of the model's own that exchanges by itself."""
        try:
            return trace()
        except StepExchanges:
            self._leave_whole_batch()
            return trace()

    def _leave_whole_batch(self) -> None:
        """Compute with each replica's own samples from here on: the step's own code exchanges what it needs."""
        self._whole_batch = False

    def _taken(self, compute: Callable[[], StepResult]) -> StepResult:
        with self._rule.stepping():
            self._count()
            result = compute()
        return result._replace(totals=self._rule.reported(result.totals))

    def _step_for(self, batch: Batch, measure: bool) -> Callable[[Batch], StepResult]:
        """Return the compiled step for this kind of batch."""
        general, share = self._general[measure], batch[3:]
        if isinstance(batch.global_samples, tf.Tensor):  # tf.is_tensor takes 9 us for a number
            return lambda batch: called(general, batch)
        parts = parts_of(batch)
        kind = (measure, *share, kind_of(parts))
        graph = self._special.find(kind, lambda: self._specialize(parts, share, measure))
        if graph is None:
            return lambda batch: general(_with_sizes_as_tensors(batch))
        return lambda batch: graph(*parts_of(batch))

    def _loop_for(self, batch: Batch) -> Callable[[Sequence[Batch]], StepResult] | None:
        """Return the compiled loop over batches of this kind; None if it is not cached."""
        step = self._step_for(batch, measure=False)
        return self._special.find(("loop", kind_of_steps(batch)), lambda: Loop(step, batch))

    def _progress(self) -> tuple[dict[str, tf.Tensor], Results]:
        """Also return the routing of tokens to experts."""
        recent, so_far = super()._progress()
        return recent | routing_metrics(self._expert_layers, self._figures), so_far

    def _specialize(self, parts: tuple[Any, ...], share: tuple[Any, ...], measure: bool) -> Callable[..., StepResult]:
        """Compile the step for batches with the same non-tensor fields `share`."""

        def run(*parts: Any) -> StepResult:
            inputs, targets, *weights = parts
            shared = dict(zip(Batch._fields[3:], share, strict=True))
            batch = Batch(inputs, targets, weights[0] if weights else None, **shared)
            return self._run(batch, measure=measure)

        return tf.function(run, autograph=False).get_concrete_function(*parts)

    def _run(self, batch: Batch, *, measure: bool) -> StepResult:
        return self._backend.run(self._replica_step, batch, measure)

    def _replica_step(self, batch: Batch, measure: bool) -> StepResult:
        batch = replica_slice(batch, self._backend)
        if not self._backend.capabilities.shares_variables:  # of which none is drawn from
            self._seed()
        rate = rate_of(self._state.optimizer)
        with reading_rows() if self._rule.updates_rows else nullcontext():
            totals, norm, here = self._updated(batch, measure=measure)
        if not measure:
            return StepResult(totals, None, here)
        finite = self._rule.finite_parameters(self._state)
        scale = loss_scale_of(self._state.optimizer) if has_dynamic_scale(self._state.optimizer) else None
        return StepResult(
            totals,
            Measured(learning_rate=rate, grad_norm=norm, loss_scale=scale, finite=finite),
            here,
        )

    def _seed(self) -> None:
        """Set random number generators: of each replica, or of the batch."""
        if not self._whole_batch:
            self._state.seed_generators(self._backend.index, self._backend.process)
            return
        self._state.seed_generators(0, 0)
        graph = tf.compat.v1.get_default_graph()
        if graph.seed is None:  # no script's tf.random.set_seed: replicas would draw apart
            graph.seed = self._state.scalars.seed

    def _updated(self, batch: Batch, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
        """Train on the batch; return the totals, the gradients' norm, and this replica's part of a guarded step."""
        raise NotImplementedError


class TrainStep(ReplicaStep):
    """A step whose gradients an update rule applies.

    Args:
        passes: computes the gradients of a microbatch.
        alone: takes its place if the step exchanges by itself, with each replica's own samples.
        microbatch: samples per microbatch; a larger batch is accumulated. None: the whole batch.
        options: of `ReplicaStep`.
    """

    def __init__(
        self,
        backend: Backend,
        state: TrainState,
        passes: Passes,
        logs: StepLogs,
        rule: UpdateRule,
        *,
        alone: Passes | None = None,
        microbatch: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(backend, state, logs, rule, whole_batch=alone is not None, **options)
        self._passes = passes
        self._alone = alone
        self._microbatch = microbatch
        self._sum = GradientSum(list(state.trainable.values()), give_back=True)

    def _leave_whole_batch(self) -> None:
        super()._leave_whole_batch()
        assert self._alone is not None
        self._passes = self._alone

    def _updated(self, batch: Batch, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
        """Train on the batch; a bad step changes no variable of model, optimizer or metrics."""
        guard = self._rule.guard
        if guard is None:
            totals, norm = self._rule.update(self._local_sums(batch), measure=measure)
            self._report_loss(batch, totals)
            return totals, norm, None
        kept = VariableSnapshot([*untrained_variables(self._state.model), *self._logs.variables()])
        local, here = guard.flagged(self._local_sums(batch))
        totals, norm = self._rule.update(local, measure=measure)
        self._report_loss(batch, totals)
        kept.restore_if_bad(totals)
        return totals, norm, here

    def _report_loss(self, batch: Batch, totals: tf.Tensor) -> None:
        self._passes.report_loss(batch, tf.math.divide_no_nan(totals[0], totals[1]))

    def _local_sums(self, batch: Batch) -> LocalGradients:
        """Run the batch at once, or its microbatches in sequence."""
        if self._microbatch is None:
            return self._passes(batch)
        parts = Microbatches(batch, self._rule.slices, self._microbatch)
        return self._passes(parts.take(0)) if parts.single else self._accumulated(parts)

    def _accumulated(self, parts: Microbatches) -> LocalGradients:
        """Accumulate microbatches: the first fixes the structure, the others run in a `tf.while_loop`."""
        local = self._passes(parts.take(0))
        self._sum.add(local.gradients, first=True)

        def body(number: tf.Tensor, totals: tf.Tensor, poison: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            more = self._passes(parts.take(number), first=False)
            self._sum.add(more.gradients, first=False)
            return number + 1, totals + more.totals, poison if more.poison is None else poison + more.poison

        # Sequential: only one microbatch's activations may be in memory.
        first = (tf.constant(1), local.totals, tf.zeros([0]) if local.poison is None else local.poison)
        _, totals, poison = tf.while_loop(lambda number, *_: number < parts.count, body, first, parallel_iterations=1)
        return local._replace(
            gradients=self._sum.read(), totals=totals, poison=None if local.poison is None else poison
        )


def _with_sizes_as_tensors(batch: Batch) -> Batch:
    has_samples, samples = tf.constant(batch.has_samples, tf.float32), tf.constant(batch.global_samples, tf.int32)
    return batch._replace(has_samples=has_samples, global_samples=samples)
