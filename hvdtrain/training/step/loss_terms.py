"""Divide a replica's losses so that Keras' values of all replicas add up.

A replica's gradients weigh its samples over all samples of the step. That is right for a loss that is a mean over
samples. One that is divided by something else, such as a mask, is `loss x own divisor / global divisor` on each
replica; one of Keras' that is a sum over samples counts in full on each.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras import (
    compiled_losses,
    compiled_metrics,
    divisor_of,
    flatten_layers,
    kept_losses,
    losses_by_output,
    module_of_losses,
    trackers_of_outputs,
)
from hvdtrain.compat.seams import GRADIENT, LOSS, LOSS_CALL, METRIC, REDUCED_LOSS, SCALED_LOSS, UNSCALED_LOSS
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.parallel.context.positions import belonging
from hvdtrain.parallel.outputs import holds_output_slices
from hvdtrain.parallel.tensor.losses import on_shards, reads_shards, sharded_form
from hvdtrain.parallel.tensor.outputs import gathered, shard_of
from hvdtrain.runtime.compiled import numbered
from hvdtrain.state.variables import unwrap
from hvdtrain.training.step.cross_entropy import fast_cross_entropy
from hvdtrain.training.step.logs import metrics_of

Divisors = Literal["exchanged", "weights", "own"]
"""What becomes of a divisor other than the number of samples, such as a sum of sample weights.

`exchanged`: it is summed over the replicas, in the pass or, where it is the only one, as the weight of the gradients;
`weights`: the only one becomes this weight, and nothing is exchanged; `own`: a slice is divided by its own.
"""
LEAST_WEIGHT = 1e-12
"""Weight of a pass that is all masked: where all are, the penalties of weights have gradients still."""
NO_WEIGHT = 1e-9
"""Weight up to which no pass of a step has counted: one for each microbatch."""
Gradients = Callable[[Any, Any, Any], Any]
"""Gradients of a target by sources, for upstream gradients or None, as of a tape."""


@dataclass(kw_only=True)
class LossTerms:
    """The losses of one pass of a replica, corrected while Keras computes them."""

    model: Any
    collectives: Collectives
    samples: tf.Tensor
    """Samples of this pass in float64; 0 for a placeholder."""
    total: tf.Tensor
    """Samples of the step over all replicas in float64."""
    whole: bool
    """Whether this pass holds all samples of the step: nothing is corrected."""
    exchangeable: bool = True
    """Whether the pass can hold an exchange, which XLA cannot compile."""
    divisors: Divisors = "weights"
    """Here `exchanged` means in this pass."""
    batch_means: bool = False
    """Whether a loss that is one number for a batch is taken for a mean over its samples."""
    of_stage: bool = False
    """Whether the model is a pipeline's stage, whose outputs may be shards of the whole model's."""
    weight: tf.Tensor | None = field(default=None, init=False)
    """Weight of this pass's loss, if it is not the number of samples."""
    _loss: str = field(default="", init=False)
    """Name of the loss that is being computed."""
    _in_compiled: bool = field(default=False, init=False)
    """Whether it is one of `compile`, which Keras adds up."""

    @contextmanager
    def corrected(self) -> Iterator[None]:
        """Correct the losses that are computed inside the context, in this thread."""
        with ExitStack() as stack:
            stack.enter_context(fast_cross_entropy())
            stack.enter_context(LOSS.replaced(keras.losses.Loss, self._naming(_of_shards(keras.losses.Loss))))
            container = compiled_losses(self.model)
            if container is not None:
                stack.enter_context(LOSS_CALL.replaced(container, self._noting(LOSS_CALL.active(container))))
            sharded = self.of_stage or holds_output_slices(self.model)
            for metric in compiled_metrics(self.model) if sharded else ():
                stack.enter_context(METRIC.replaced(metric, _counting_shards(metric)))
            module = module_of_losses()
            for seam in (SCALED_LOSS, UNSCALED_LOSS):
                # Keras divides by the replicas of a strategy, whose gradients weigh their samples already.
                stack.enter_context(seam.replaced(module, lambda value: value))
            if not self.whole:
                original = REDUCED_LOSS.active(module)
                stack.enter_context(REDUCED_LOSS.replaced(module, partial(self._reduced, original)))
            for tracker in trackers_of_outputs(self.model):
                stack.enter_context(METRIC.replaced(tracker, self._tracking(tracker)))
            if not self.whole:
                for metric in means_of(self.model):
                    stack.enter_context(METRIC.replaced(metric, averaging(metric, self._counted_once)))
            yield

    def _reduced(
        self,
        original: Callable[..., Any],
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        value = original(values, sample_weight, mask, reduction, dtype)
        if tf.convert_to_tensor(values).shape.rank == 0:
            if not self.batch_means or sample_weight is not None or mask is not None:
                raise refusal_of_number(self._loss)
            return value
        if reduction == "sum":
            return self.over_share(value)
        if reduction in (None, "none"):
            if not self._in_compiled:
                return value  # a step's own code makes one number of it
            raise ConfigError(
                f"The loss {self._loss!r} has reduction={reduction!r}, with which nothing is averaged. Use "
                '"sum_over_batch_size", or "sum".'
            )
        divisor = divisor_of(sample_weight, mask, reduction, value.dtype)
        if divisor is None or self.divisors == "own":
            return value
        if self.divisors == "weights":
            weight = tf.maximum(tf.cast(divisor, tf.float64), LEAST_WEIGHT)
            self.weight = tf.where(self.samples > 0, weight, tf.zeros_like(weight))
            return value
        if not self.exchangeable:
            raise ConfigError(
                "The loss of one output is divided by its own weights (a mask, ignore_class, mean_with_sample_weight) "
                f"beside other losses: XLA cannot hold the exchange of these weights. Leave out {opt('jit')}."
            )
        own = tf.where(self.samples > 0, divisor, tf.zeros_like(divisor))
        # Of this pass over all replicas: each microbatch is divided by its own divisor, as Keras does.
        mine = tf.stack([tf.cast(own, tf.float64), self.samples])
        with kept_losses(flatten_layers(self.model)):  # the replicas of a strategy call one model in turns
            total = self.collectives.all_reduce(mine, name=numbered("loss/divisor"))
        divisors, samples = tf.unstack(total, num=2)
        share = tf.math.divide_no_nan(mine[0] * samples, divisors * self.samples)
        return value * tf.cast(share, value.dtype)

    def _naming(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a loss's call that notes its name."""

        def named(loss: Any, *arguments: Any, **options: Any) -> Any:
            outer, self._loss = self._loss, loss.name
            try:
                return call(loss, *arguments, **options)
            finally:
                self._loss = outer

        return named

    def _noting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call of the compiled losses that notes that it is under way."""

        def noted(*arguments: Any, **options: Any) -> Any:
            self._in_compiled = True
            try:
                return call(*arguments, **options)
            finally:
                self._in_compiled = False

        return noted

    def _counted_once(self, value: tf.Tensor, weight: Any) -> tuple[tf.Tensor, Any]:
        """Return what a `Mean` takes for a number of this pass's samples, which counts once over all replicas."""
        if weight is None:
            weight = tf.cast(tf.math.divide_no_nan(self.samples, self.total), value.dtype)
        return value, weight

    def over_share(self, value: tf.Tensor) -> tf.Tensor:
        """Return `value` over this pass's share of the samples."""
        return value * tf.cast(tf.math.divide_no_nan(self.total, self.samples), value.dtype)

    def _tracking(self, tracker: Any) -> Callable[..., None]:
        """Return the update of the mean loss of an output, in which each batch counts once, as in Keras."""
        original = METRIC.active(tracker)

        def update_state(loss: Any, sample_weight: Any = None) -> None:
            original(loss, sample_weight=tf.cast(tf.math.divide_no_nan(self.samples, self.total), loss.dtype))

        return update_state


def refusal_of_number(loss: str) -> ConfigError:
    """Return the error for a loss, by its name, whose one number for a batch cannot be put together from slices."""
    return ConfigError(
        f"The loss {loss!r} returns one number for the whole batch, of which each rank or microbatch has a slice. "
        "Return one value for each sample, such as keras.ops.mean(keras.ops.square(targets - outputs), axis=-1), or "
        f"pass {opt('whole_batch', False)}, by which it is a mean over a rank's samples, without weights and masks."
    )


def means_of(model: Any) -> list[Any]:
    """Return the metrics that take means or sums of numbers of a whole batch, which code that is not Keras' forms."""
    keras_own = {id(tracker) for tracker in trackers_of_outputs(model)}
    kinds = (keras.metrics.Mean, keras.metrics.Sum)
    return [metric for metric in metrics_of(model) if type(metric) in kinds and id(metric) not in keras_own]


def averaging(metric: Any, counted: Callable[[tf.Tensor, Any], tuple[tf.Tensor, Any]]) -> Callable[..., Any]:
    """Return an `update_state` that takes the value and weight of `counted` for one number."""
    original = METRIC.active(metric)

    def update_state(values: Any, sample_weight: Any = None) -> Any:
        number = tf.convert_to_tensor(values)
        if number.shape.rank == 0 and number.dtype.is_floating:
            values, sample_weight = counted(number, sample_weight)
        return original(values, sample_weight=sample_weight)

    return update_state


@contextmanager
def differentiating(trained: Collection[int], compute: Callable[[Gradients, Any, Any, Any], Any]) -> Iterator[None]:
    """Let `compute(own, target, sources, upstream)` form gradients by trained variables, in this thread.

    `trained` are their ids; `own` are the tape's gradients.
    """
    original = GRADIENT.active(tf.GradientTape)
    within = False  # a layer that recomputes has a tape of its own in the backward pass

    def gradient(tape: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **options: Any) -> Any:
        nonlocal within

        def own(target: Any, sources: Any, upstream: Any) -> Any:
            return original(tape, target, sources, upstream, *args, **options)

        known = (id(unwrap(each)) in trained for each in tf.nest.flatten(sources) if hasattr(each, "assign"))
        if within or not any(known):
            return own(target, sources, output_gradients)
        within = True
        try:
            return compute(own, target, sources, output_gradients)
        finally:
            within = False

    with GRADIENT.replaced(tf.GradientTape, gradient):
        yield


def trained_ids(model: Any) -> set[int]:
    """Return the ids of a model's trainable variables."""
    return {id(unwrap(variable)) for variable in model.trainable_variables}


def has_one_divisor(model: Any) -> bool:
    """Return whether the divisor of a compiled model's loss can be the weight of its gradients.

    That needs a single loss, beside which only penalties of weights count.
    """
    return len(losses_by_output(model)) == 1


def _counting_shards(metric: Any) -> Callable[..., Any]:
    """Return a metric's update that takes outputs of which a rank holds a shard, with the targets that belong to it."""
    original = METRIC.active(metric)

    def update_state(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        shard = shard_of(y_pred)
        y_true, sample_weight = belonging(y_pred, y_true, sample_weight)
        if shard is None or not reads_shards(metric):
            return original(y_true, gathered(y_pred), sample_weight=sample_weight)
        with on_shards(metric, shard):
            return original(y_true, y_pred, sample_weight=sample_weight)

    return update_state


def _of_shards(kind: Any) -> Callable[..., Any]:
    """Return a loss's call that takes outputs of which a rank holds a shard, with the targets that belong to it."""
    original = LOSS.active(kind)

    def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if tf.nest.is_nested(y_pred) or tf.nest.is_nested(y_true):
            return original(loss, y_true, y_pred, sample_weight)
        shard = shard_of(y_pred)
        y_true, sample_weight = belonging(y_pred, y_true, sample_weight)
        of_slices = None if shard is None else sharded_form(loss, shard)
        if of_slices is None:
            return original(loss, y_true, gathered(y_pred), sample_weight)
        with LOSS_CALL.replaced(type(loss), lambda _, labels, logits: of_slices(labels, logits)):
            return original(loss, y_true, y_pred, sample_weight)

    return call
