"""Losses as sum and weight, so that uneven replicas reduce exactly."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.compat.keras import mask_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.models.objective import known_losses, nearest
from hvdtrain.parallel.context.positions import belonging, positions_of
from hvdtrain.parallel.tensor.losses import sharded_form
from hvdtrain.parallel.tensor.outputs import gathered, shard_of
from hvdtrain.training.objective.cross_entropy import fast_form
from hvdtrain.training.objective.outputs import outputs_by_name, per_output


class LossSum(NamedTuple):
    """One replica's share of a loss: the mean over all replicas is sum(total) / sum(weight)."""

    total: tf.Tensor
    """Scalar: sum of weight x loss over this replica's elements."""
    weight: tf.Tensor
    """Scalar of the same dtype: sum of the weights."""
    elements_per_sample: tf.Tensor
    """Scalar: loss values per sample (1 for a class label, the length for a sequence)."""
    uniform: bool
    """Whether all weights are 1, so that the global weight is known in advance."""


LossFunction = Callable[[Any, Any, Any], LossSum]
"""(targets, outputs, sample weights or None) -> this replica's loss sum."""

_COUNTED = ("sum_over_batch_size", "mean", "auto")
_WEIGHTED = "mean_with_sample_weight"


def summed_loss(loss: Any, loss_weights: Any = None, names: Callable[[], Any] = lambda: None) -> LossFunction:
    """Convert the loss argument of `Model.compile` to a LossFunction.

    Args:
        loss: a Keras loss, its name, or a function `f(y_true, y_pred)` of per-sample values; for several outputs one
            for all of them, or a dict or list of them, with None for an output without a loss.
        loss_weights: numbers, in a dict or list like the losses.
        names: returns the names of the model's outputs, once it is built.

    Raises:
        ConfigError: a loss whose reduction is not a mean over samples, or another structure than the outputs.
    """
    known = _loss_functions(loss)

    def loss_sum(targets: Any, outputs: Any, sample_weight: Any) -> LossSum:
        if callable(known) and loss_weights is None and not isinstance(outputs, dict | list | tuple):
            return known(targets, outputs, sample_weight)
        return _several(
            known,
            loss_weights=loss_weights,
            by_name=outputs_by_name(outputs, names()),
            targets=targets,
            sample_weight=sample_weight,
        )

    return loss_sum


def losses_by_output(loss: Any, names: Sequence[str]) -> dict[str, LossFunction | None]:
    """Return each output's loss, or None; `loss` as for `summed_loss`."""
    return per_output("loss", _loss_functions(loss), names, shared=True)


def _loss_functions(loss: Any) -> Any:
    """Convert losses to LossFunctions, in their structure."""
    nested = isinstance(loss, dict | list | tuple)
    return tf.nest.map_structure(lambda one: None if nested and one is None else _one_loss(one), loss)


def _several(losses: Any, loss_weights: Any, by_name: dict[str, Any], targets: Any, sample_weight: Any) -> LossSum:
    """Sum the mean losses of several outputs; the weight is the number of samples."""
    loss_of = per_output("loss", losses, list(by_name), shared=True)
    factors = per_output("loss_weights", loss_weights, list(by_name), shared=True)
    labels = per_output("The target", targets, list(by_name), shared=False)
    weights = per_output("sample_weight", sample_weight, list(by_name), shared=True)
    means = []
    for output, loss in loss_of.items():
        if loss is None:
            continue
        summed = loss(labels[output], by_name[output], weights[output])
        if not summed.uniform:
            raise ConfigError(
                f"The loss of the output {output!r} is divided by its own weights (a mask, or the reduction "
                f"{_WEIGHTED}): with several outputs that is not exact over ranks. Give it plain sample weights."
            )
        factor = 1.0 if factors[output] is None else float(factors[output])
        means.append(summed.total * factor / summed.elements_per_sample)
    if not means:
        raise ConfigError(f"None of the outputs {', '.join(by_name)} has a loss.")
    total = tf.add_n([tf.cast(mean, means[0].dtype) for mean in means])
    first = next(iter(by_name.values()))
    positions, samples = positions_of(first), tf.cast(tf.shape(first)[0], total.dtype)
    # With positions sharded over ranks, each rank counts a share of a sample.
    weight = samples if positions is None else samples / positions.ranks
    return LossSum(total, weight, tf.ones_like(samples), uniform=True)


def _one_loss(loss: Any) -> LossFunction:
    keras_loss = _known(loss)
    reduction = getattr(keras_loss, "reduction", "sum_over_batch_size")
    if reduction not in (*_COUNTED, _WEIGHTED):
        raise ConfigError(
            f"The loss {loss!r} reduces by {reduction!r}; hvdtrain forms the mean over all ranks itself. "
            'Use reduction="sum_over_batch_size".'
        )
    values_of = fast_form(keras_loss) or (keras_loss.call if isinstance(keras_loss, keras.losses.Loss) else keras_loss)

    def loss_sum(targets: Any, outputs: Any, sample_weight: Any) -> LossSum:
        shard, positions = shard_of(outputs), positions_of(outputs)
        targets, sample_weight = belonging(outputs, targets, sample_weight)
        of_slices = None if shard is None else sharded_form(keras_loss, shard)
        if of_slices is not None:
            values = of_slices(targets, _at_least_float32(outputs))
        else:
            outputs = gathered(outputs)
            values = tf.convert_to_tensor(values_of(*_aligned(targets, _at_least_float32(outputs))))
        mask = _mask_of(outputs, values)
        summed = _weighted_sum(values, sample_weight, mask, divide_by_weights=reduction == _WEIGHTED)
        ranks = 1 if positions is None else positions.ranks
        return summed._replace(elements_per_sample=summed.elements_per_sample * ranks)

    return loss_sum


def with_model_losses(summed: LossSum, model: Any) -> LossSum:
    """Add the model's regularization and `add_loss` terms to a replica's loss sum.

    Each term is a mean over the replica's samples, or equal on all replicas; multiplied by the replica's weight, the
    terms sum to those of one process. Call it right after `model`.
    """
    if not model.losses:
        return summed
    extra = tf.add_n([tf.cast(term, summed.total.dtype) for term in model.losses])
    return summed._replace(total=summed.total + summed.weight * extra)


def _known(loss: Any) -> Any:
    if loss is None:
        raise ConfigError("A loss is needed. Received: None.")
    try:
        return keras.losses.get(loss)
    except (ValueError, TypeError) as error:
        said = f".{nearest(loss, known_losses())}" if isinstance(loss, str) else f": {error}"
        raise ConfigError(f"Unknown loss {loss!r}{said}") from error


def _at_least_float32(outputs: Any) -> Any:
    """Cast 16-bit outputs to float32, since sums of losses overflow 16 bits."""
    return tf.nest.map_structure(
        lambda t: tf.cast(t, tf.float32) if t.dtype.is_floating and t.dtype.size < 4 else t, outputs
    )


def _aligned(targets: Any, outputs: Any) -> tuple[Any, Any]:
    """Cast targets, and squeeze a trailing dim of 1 like Keras."""
    if tf.nest.is_nested(targets) or tf.nest.is_nested(outputs):
        return targets, outputs
    targets = tf.convert_to_tensor(targets)
    if targets.dtype != outputs.dtype and targets.dtype != tf.string:
        targets = tf.cast(targets, outputs.dtype)
    ranks = targets.shape.rank, outputs.shape.rank
    if ranks == (1, 2) and outputs.shape[-1] == 1:
        targets = targets[:, tf.newaxis]
    elif ranks == (2, 1) and targets.shape[-1] == 1:
        outputs = outputs[:, tf.newaxis]
    elif None not in ranks and ranks[0] == ranks[1] + 1 and targets.shape[-1] == 1:
        targets = tf.squeeze(targets, -1)
    elif None not in ranks and ranks[1] == ranks[0] + 1 and outputs.shape[-1] == 1:
        outputs = tf.squeeze(outputs, -1)
    return targets, outputs


def _mask_of(outputs: Any, values: tf.Tensor) -> Any:
    """Return the mask of layers (`mask_zero`) and loss (`ignore_class`), or None."""
    masks = [mask_of(tensor) for tensor in (outputs, values)]
    known = [tf.cast(mask, tf.bool) for mask in masks if mask is not None]
    return functools.reduce(tf.logical_and, known) if known else None


def _weighted_sum(values: tf.Tensor, sample_weight: Any, mask: Any, *, divide_by_weights: bool) -> LossSum:
    """Sum `values` [samples, …] with left-aligned weights and mask."""
    if values.shape.rank == 0:
        raise ConfigError("The loss returned one number for the whole batch: one value for each sample is needed.")
    elements = tf.cast(tf.size(values), values.dtype)
    per_sample = elements / tf.cast(tf.shape(values)[0], values.dtype)
    weight = elements
    if mask is not None:
        kept = _broadcast(mask, values)
        # 0 * NaN is NaN: masked elements are replaced, not multiplied by zero.
        values = tf.where(kept > 0, values, tf.zeros_like(values))
        weight = tf.reduce_sum(kept)
    if sample_weight is not None:
        scale = _broadcast(sample_weight, values)
        values = values * scale
        if divide_by_weights:
            weight = tf.reduce_sum(scale if mask is None else scale * _broadcast(mask, values))
    uniform = mask is None and (sample_weight is None or not divide_by_weights)
    return LossSum(tf.reduce_sum(values), weight, per_sample, uniform)


def _broadcast(factor: Any, values: tf.Tensor) -> tf.Tensor:
    factor = tf.cast(factor, values.dtype)
    if factor.shape.rank == values.shape.rank + 1 and factor.shape[-1] == 1:
        factor = tf.squeeze(factor, -1)
    if factor.shape.rank > values.shape.rank:
        raise ConfigError(
            f"Sample weights or masks of shape {tuple(factor.shape)} do not fit losses of shape {tuple(values.shape)}: "
            "one for each sample is needed."
        )
    while factor.shape.rank < values.shape.rank:
        factor = factor[..., tf.newaxis]
    return tf.broadcast_to(factor, tf.shape(values))
