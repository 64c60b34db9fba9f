"""A replica's pass through the model's `train_step`, whose gradients it returns."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import loss_tracker
from hvdtrain.compat.keras_variables import rate_after_update, trained_variables
from hvdtrain.compat.seams import APPLY, METRIC, MODEL_CALL, RATE
from hvdtrain.data.batch import Batch
from hvdtrain.gradients.reduction import Gradient, scaled
from hvdtrain.layers.exchanging import exchanging_layers, samples_of
from hvdtrain.layers.fused_batch_norm import fused_normalization, fusible_layers
from hvdtrain.layers.sync_batch_norm import replicas_of, sync_layers
from hvdtrain.optim.averaging import innermost
from hvdtrain.parallel.outputs import holds_output_slices, local_outputs
from hvdtrain.state.train_state import TrainState
from hvdtrain.state.variables import as_written, unwrap
from hvdtrain.training.step.batches import (
    applies_nothing,
    counts_of,
    has_own_train_step,
    number_of_samples,
    reads_outputs,
    take_train_step,
)
from hvdtrain.training.step.contract import LocalGradients, Parameters, Pass
from hvdtrain.training.step.finite import zero_if_finite
from hvdtrain.training.step.logs import StepLogs
from hvdtrain.training.step.loss_terms import (
    Divisors,
    Gradients,
    LossTerms,
    differentiating,
    has_one_divisor,
)
from hvdtrain.training.step.own_code import may_add_losses
from hvdtrain.training.step.placeholder import counted, kept_statistics, updated_statistics
from hvdtrain.training.step.traced import offset_seeds


def report_loss(model: Any, batch: Batch, loss: tf.Tensor, logs: StepLogs) -> None:
    """Count the loss of a step over all replicas in what a compiled model reports as `loss`."""
    with logs.counting(batch.has_samples):
        loss_tracker(model).update_state(loss, sample_weight=number_of_samples(batch))


class ForwardBackward:
    """Calls the model's `train_step` on this replica's samples, and takes the gradients that it applies.

    Args:
        logs: records the results of the step.
        forward: takes the place of the model's call, such as one that recomputes; default: the model's own.
        jit: compile the pass by XLA.
        parameters: what is read and differentiated for the trained variables.
        own: whether code that is not Keras' takes part, which may exchange by itself.
        batch_means: whether a loss that is one number for a batch is taken for a mean over its samples.
        whole: whether a pass holds all samples of its step, and is divided by nothing else.
        divisors: what becomes of divisors of a loss that are not the number of samples.
    """

    def __init__(
        self,
        backend: Backend,
        state: TrainState,
        logs: StepLogs,
        *,
        forward: Callable[..., Any] | None = None,
        jit: bool = False,
        parameters: Parameters | None = None,
        own: bool = False,
        batch_means: bool = False,
        whole: bool = False,
        divisors: Divisors = "exchanged",
    ) -> None:
        self._backend = backend
        self._state = state
        self._logs = logs
        self._forward = forward
        self._synchronized = sync_layers(state.model)
        self._exchanging = exchanging_layers(state.model)
        self._fusible = fusible_layers(state.model)
        self._jit = jit
        self._parameters = parameters or Parameters(state.trainable)
        self._own = own
        self._batch_means = batch_means
        self._adds_losses = may_add_losses(state.model)
        self._whole = whole
        self._divisors = divisors
        self._positions = max(backend.axes.get("cp", 1), 1)
        self.reports_loss_later = False
        """Whether the loss is reported by `report_loss` once it is known over all replicas."""

    def __call__(
        self, batch: Batch, *, first: bool = True, within: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> LocalGradients:
        """Run a microbatch, the `first` of its step or another, within `within()`; a placeholder gives zeros."""
        if not self._jit:
            return self._both(batch, first, within)
        uniform: list[bool] = []

        def compiled(*parts: Any) -> tuple[Any, ...]:
            given = dict(zip(Batch._fields, parts, strict=False))
            local = self._both(batch._replace(**given), first, within)
            uniform.append(local.uniform)
            return local.gradients, local.totals, local.expected_weight

        gradients, totals, expected = tf.function(compiled, autograph=False, jit_compile=True)(*batch[:5])
        return LocalGradients(gradients, totals, expected, uniform[-1])

    def _divisors_of(self, model: Any) -> Divisors:
        """Return what becomes of the divisors of a pass."""
        if has_one_divisor(model) and not reads_outputs(model) and not self._adds_losses:
            return "own" if self._divisors == "own" else "weights"
        return "exchanged" if self._divisors == "exchanged" else "own"

    def report_loss(self, batch: Batch, loss: tf.Tensor) -> None:
        """Report the loss of a step over all replicas, if it was not known to a pass."""
        if self.reports_loss_later:
            report_loss(self._state.model, batch, loss, self._logs)

    def _both(self, batch: Batch, first: bool, within: Callable[[], AbstractContextManager[Any]]) -> LocalGradients:
        model = self._state.model
        # Synchronized statistics are updated on all replicas, including those without samples.
        statistics = updated_statistics(model, but=self._synchronized)
        # Around both passes: both communicate, and --recompute calls layers in the second.
        with (
            kept_statistics(statistics, batch, synchronized=self._synchronized, shared=True),
            self._logs.counting(batch.has_samples),
            replicas_of(self._synchronized, self._backend, batch.has_samples),
            samples_of(self._exchanging, batch.has_samples),
            fused_normalization(self._fusible),
            self._parameters.passes(batch.has_samples) as passes,
        ):
            return self._sums(batch, passes, first=first, within=within)

    def _sums(
        self, batch: Batch, passes: Pass, *, first: bool, within: Callable[[], AbstractContextManager[Any]]
    ) -> LocalGradients:
        model = self._state.model
        poison = (
            tf.constant(0.0)
            if batch.finite
            else zero_if_finite(tf.nest.flatten((batch.inputs, batch.targets), expand_composites=True))
        )
        samples, total = counts_of(batch, self._backend.data_parallel)
        terms = LossTerms(
            model=model,
            collectives=self._backend,
            samples=samples / self._positions,
            total=total,
            whole=self._whole,
            divisors=self._divisors_of(model),
            exchangeable=not self._jit,
            batch_means=self._batch_means,
        )
        taken = _Taken(
            self._state,
            terms=terms,
            passes=passes,
            sources=self._parameters.sources(),
            exchanges_backward=bool(
                self._synchronized or self._exchanging or self._parameters.exchanges_backward or self._own
            ),
        )
        with (
            within(),
            offset_seeds(self._backend.index),
            terms.corrected(),
            taken.from_step(),
            self._logs.recording(),
            called_as(model, self._forward),
        ):
            returned = take_train_step(model, batch)
        watched = self._logs.take(returned, samples, first=first)
        loss = tf.add_n([tf.cast(each, tf.float64) for each in watched]) if taken.loss is None else taken.loss
        self.reports_loss_later = terms.weight is not None
        gradients, by_gradient = passes.collected(taken.gradients())
        dtype = tf.float64 if loss.dtype == tf.float64 else tf.float32
        weight = terms.samples if terms.weight is None else terms.weight
        parts = (tf.cast(loss, tf.float64) * weight, weight, tf.cast(poison, tf.float64))
        return LocalGradients(
            gradients=gradients,
            totals=counted(tf.cast(tf.stack(parts), dtype), batch.has_samples),
            expected_weight=terms.total,
            uniform=terms.weight is None and not batch.nominal,
            poison=by_gradient,
        )


def called_as(model: Any, forward: Callable[..., Any] | None = None) -> AbstractContextManager[None]:
    """Let calls of `model` inside the context be `forward`, if any, with outputs that stay sharded.

    A model's own code, which would not know, is given whole outputs.
    """
    sharded = holds_output_slices(model) and not reads_outputs(model)
    if forward is None and not sharded:
        return nullcontext()
    inner = model.call if forward is None else _without_mask(forward)
    if not sharded:
        return MODEL_CALL.replaced(model, inner)
    return MODEL_CALL.replaced(model, lambda *args, **options: local_outputs(model, inner, *args, **options))


def _without_mask(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` as a Functional model's call, which Keras also passes a mask."""

    def call(inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        return forward(inputs, training=training)

    return call


class AppliedGradients:
    """The gradients that a model's `train_step` computes and applies with its optimizer."""

    def __init__(self, state: TrainState, passes: Pass, sources: Sequence[tf.Variable]) -> None:
        self._model = state.model
        self._optimizer = state.optimizer
        self._passes = passes
        self._variables = [id(variable) for variable in state.trainable.values()]
        self._sources = dict(zip(self._variables, sources, strict=True))
        self._by_variable: dict[int, Gradient] | None = None

    @contextmanager
    def from_step(self) -> Iterator[None]:
        """Take them from a `train_step` that is called inside the context, in this thread."""
        inner = innermost(self._optimizer)
        with (
            differentiating(self._sources, self._gradient),
            APPLY.replaced(self._optimizer, self._apply),
            RATE.replaced(inner, self._rate_of(inner)),
        ):
            yield

    def gradients(self) -> list[Gradient]:
        """Return the gradients in the order of the trained variables.

        Raises ConfigError if none were applied.
        """
        if not self._variables:
            return []
        if self._by_variable is None:
            raise applies_nothing(self._model)
        return [self._by_variable.get(variable) for variable in self._variables]

    def _gradient(self, own: Gradients, target: Any, sources: Any, upstream: Any) -> Any:
        """Return the gradients by what is read in place of trained variables, for `differentiating`."""
        self._passes.end_forward()
        flat = tf.nest.flatten(sources)
        mine = [self._sources.get(id(unwrap(each))) if hasattr(each, "assign") else None for each in flat]
        upstream = self._upstream(target, mine, upstream)
        flat = [each if source is None else source for each, source in zip(flat, mine, strict=True)]
        return tf.nest.pack_sequence_as(sources, own(target, flat, upstream))

    def _upstream(self, target: Any, sources: Sequence[Any], given: Any) -> Any:
        """Return the upstream gradient of a target that is differentiated by `sources`; None: ones."""
        return given

    @as_written
    def _apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        variables = (
            trained_variables(innermost(self._optimizer)) if trainable_variables is None else trainable_variables
        )
        pairs = zip(variables, grads, strict=True)
        self._by_variable = {id(unwrap(variable)): gradient for variable, gradient in pairs}

    def _rate_of(self, optimizer: Any) -> Callable[[], Any]:
        """Return an optimizer's learning rate, which a step reads after `apply` as after the update."""
        rate = RATE.active(optimizer)
        return lambda: rate() if self._by_variable is None else rate_after_update(optimizer, rate)


class _Taken(AppliedGradients):
    """Gradients that weigh a replica's samples, and the loss."""

    def __init__(
        self,
        state: TrainState,
        terms: LossTerms,
        passes: Pass,
        sources: Sequence[tf.Variable],
        *,
        exchanges_backward: bool,
    ) -> None:
        super().__init__(state, passes, sources)
        self._exchanges_backward = exchanges_backward
        self._terms = terms
        self._is_weighted = False
        self.loss: tf.Tensor | None = None
        """The loss of Keras' own step; None: see the step's results."""

    @contextmanager
    def from_step(self) -> Iterator[None]:
        """Also note the loss of Keras' own step."""
        with ExitStack() as stack:
            stack.enter_context(super().from_step())
            if not has_own_train_step(self._model):
                tracker = loss_tracker(self._model)
                stack.enter_context(METRIC.replaced(tracker, self._noting(tracker)))
            yield

    def gradients(self) -> list[Gradient]:
        """Return the gradients, weighted."""
        found = super().gradients()
        return found if self._is_weighted else [scaled(gradient, self._share()) for gradient in found]

    def _share(self) -> tf.Tensor:
        """Return the weight of this pass's gradients over the expected one."""
        weight = self._terms.samples if self._terms.weight is None else self._terms.weight
        return tf.math.divide_no_nan(weight, self._terms.total)

    def _upstream(self, target: Any, sources: Sequence[Any], given: Any) -> Any:
        if not self._weighs_upstream(target, sources, given):
            return given
        self._is_weighted = True
        return tf.nest.map_structure(
            lambda each: tf.broadcast_to(tf.cast(self._share(), each.dtype), tf.shape(each)), target
        )

    def _weighs_upstream(self, target: Any, sources: Sequence[Any], output_gradients: Any) -> bool:
        """Return whether the weight of this pass is the upstream gradient of its loss, and no factor of the gradients.

        That costs nothing, where a factor costs a pass over them, but the loss may have fewer bits. It must be where
        the backward pass adds up gradients of several replicas, which have other weights.
        """
        if output_gradients is not None:
            return False
        if self._exchanges_backward:
            return True
        least = min(each.dtype.size for each in tf.nest.flatten(target))
        narrow = any(source is not None and source.dtype.size > least for source in sources)
        return not narrow and not has_own_train_step(self._model)

    def _noting(self, tracker: Any) -> Callable[..., None]:
        original = METRIC.active(tracker)

        def update_state(loss: Any, sample_weight: Any = None) -> None:
            self.loss = tf.reduce_mean(loss) if len(loss.shape) else loss  # as the tracker has it
            if self._terms.weight is None:
                original(loss, sample_weight=sample_weight)

        return update_state
