"""Find losses and outputs in which samples are not apart: those of a batch are not put together from its halves."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.compat.keras import compiled_losses, flatten_layers, losses_by_output, module_of_losses
from hvdtrain.compat.tensorflow import compiled
from hvdtrain.data.batch import Batch, rows_of, samples_in
from hvdtrain.training.step.batches import number_of_samples, reads_outputs
from hvdtrain.training.step.logs import StepLogs
from hvdtrain.training.step.loss_terms import refusal_of_number
from hvdtrain.training.step.own_code import takes_samples_alone
from hvdtrain.training.step.patches import active, replaced
from hvdtrain.training.step.probing import (
    EXACT,
    adds_up,
    described,
    draws,
    exchanges,
    formed_by,
    halves_of,
    mixes_by_design,
    unchanged,
)

ROUNDING = 1e-4
"""Deviation of a number that Keras computes in 32 bits."""


def inspect_losses(model: Any, batch: Batch) -> tuple[bool, list[str]]:
    """Return `Kinds.batch_means`, and warnings of compiled losses in which a sample's value depends on other samples.

    Keras' own losses along other axes than the first do not. Others are computed for the outputs of a batch, as in
    evaluation, and of its halves.

    Raises:
        ConfigError: a loss is one number for the batch, and not the mean of those of its halves.
    """
    unknown = [loss for loss in losses_by_output(model) if not takes_samples_alone(loss)]
    halves = halves_of(batch)
    if not unknown or halves is None:
        return False, []
    names = ", ".join(sorted({getattr(loss, "name", type(loss).__name__) for loss in unknown}))
    are_numbers: list[bool] = []
    outputs = model(halves[2].inputs, training=False)
    original = active(module_of_losses(), "reduce_weighted_values")

    def sums(targets: Any, outputs: Any) -> list[tf.Tensor]:
        found = []
        are_numbers.clear()

        def noted(values: Any, *arguments: Any, **options: Any) -> Any:
            found.append(tf.reduce_sum(tf.cast(values, tf.float64)))
            are_numbers.append(tf.convert_to_tensor(values).shape.rank == 0)
            return original(values, *arguments, **options)

        with replaced(module_of_losses(), "reduce_weighted_values", noted):
            compiled_losses(model)(targets, outputs)
        return found

    compute = compiled(sums, reduce_retracing=True)
    graph = compute.get_concrete_function(halves[2].targets, outputs).graph
    if exchanges(graph):
        return False, []
    rows = int(rows_of(samples_in(halves[0])))
    cuts = (slice(0, rows), slice(rows, None), slice(None))

    def values_of(*targets: Any) -> list[tuple[float, ...]]:
        """Return each loss's values of both halves and of the whole, with these targets."""
        results = [
            compute(part, tf.nest.map_structure(lambda each, cut=cut: each[cut], outputs))
            for part, cut in zip(targets, cuts, strict=True)
        ]
        return [tuple(float(each) for each in of_loss) for of_loss in zip(*results, strict=True)]

    def probed(*targets: Any) -> list[tuple[float, ...]]:
        try:
            return values_of(*targets)
        except tf.errors.InvalidArgumentError:  # such targets are none of this loss
            return []

    with unchanged(model, graph):
        known = values_of(*(part.targets for part in halves))
        # A mean over the targets that are not padding is one over samples where none is.
        padded = [probed(*_padded(halves, number)) for number in (0, -1)] if any(are_numbers) else []
        padded = [values for values in padded if values]
    for values in (known, *padded):
        of_batch = [each for each, is_number in zip(values, are_numbers, strict=True) if is_number]
        if not all(adds_up(*each, mean=True, tolerance=ROUNDING) for each in of_batch):
            raise refusal_of_number(names)
    of_samples = [each for each, is_number in zip(known, are_numbers, strict=True) if not is_number]
    added_up = all(adds_up(*each, mean=False) for each in of_samples)
    return any(are_numbers), [] if added_up else [of_pairs(f"of {names}")]


def inspect_forward(model: Any, batch: Batch, logs: StepLogs) -> list[str]:
    """Return warnings of outputs, and losses that layers add, that are others for a batch than for its halves.

    In evaluation, where neither dropout nor statistics of a batch keep halves from adding up, and in training where
    nothing else does.
    """
    halves = halves_of(batch._replace(has_samples=1.0))
    if halves is None:
        return []
    together: dict[str, None] = {}
    for training in (False, True):
        compute, names = _forward(model, logs, training=training)
        graph = compute.get_concrete_function(halves[2]).graph
        if exchanges(graph):
            return []
        if draws(graph) or (training and mixes_by_design(model, [])):
            continue
        with unchanged(model, graph):
            values = zip(*([float(each) for each in compute(part)] for part in halves), strict=True)
            for name, parts in zip(names, values, strict=True):
                if not any(adds_up(*parts, mean=mean, tolerance=_tolerance(model)) for mean in (True, False)):
                    together[name] = None
    return [of_pairs(f"that {name} adds") if name else _of_outputs(model) for name in together]


def _forward(model: Any, logs: StepLogs, *, training: bool) -> tuple[Any, list[str]]:
    """Return what computes the squares of a batch's outputs and the losses that layers add, and their names.

    The outputs have an empty name. The names are known once it is compiled.
    """
    own = {described(layer) for layer in flatten_layers(model) if _adds_losses(layer)}
    names: list[str] = []

    def numbers(batch: Batch) -> list[tf.Tensor]:
        squares: list[tf.Tensor] = []

        def step(batch: Batch, noted: Any) -> None:
            outputs = tf.nest.flatten(model(batch.inputs, training=training), expand_composites=True)
            floating = [each for each in outputs if tf.is_tensor(each) and each.dtype.is_floating]
            squares.append(
                sum(
                    (tf.reduce_sum(tf.square(tf.cast(each, tf.float64))) for each in floating), tf.zeros([], tf.float64)
                )
            )

        found = formed_by(model, batch, total=number_of_samples(batch), step=step, logs=logs)
        added = [each for each in found if each.role == "added" and each.name in own]
        names[:] = ["", *(each.name for each in added)]
        return [*squares, *(tf.cast(each.value, tf.float64) for each in added)]

    return compiled(numbers, reduce_retracing=True), names


def _tolerance(model: Any) -> float:
    """Return the deviation of numbers that a model computes, by the bits of its layers."""
    short = any(layer.compute_dtype in ("float16", "bfloat16") for layer in flatten_layers(model))
    return EXACT if short else ROUNDING


def _padded(halves: Sequence[Batch], number: int) -> tuple[Any, Any, Any]:
    """Return the targets of the halves and of both, with `number` for every other one of the second half."""

    def padded(targets: tf.Tensor) -> tf.Tensor:
        odd = tf.reshape(tf.range(tf.size(targets)) % 2 == 1, tf.shape(targets))
        return tf.where(odd, tf.cast(number, targets.dtype), targets)

    first, second = halves[0].targets, tf.nest.map_structure(padded, halves[1].targets)
    return first, second, tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), first, second)


def _adds_losses(layer: Any) -> bool:
    """Return whether code that is not Keras' may add losses in a layer's call: its own, or an activity regularizer."""
    regularizer = getattr(layer, "activity_regularizer", None)
    return _is_foreign(layer) or (regularizer is not None and _is_foreign(regularizer))


def _is_foreign(thing: Any) -> bool:
    module = getattr(thing, "__module__", type(thing).__module__)  # of a function, its own
    return module.split(".")[0] not in ("keras", "hvdtrain")


def of_pairs(whose: str) -> str:
    """Return the warning of a loss that a batch's halves do not put together."""
    return (
        f"warning: the loss {whose} is neither a mean nor a sum over the samples: halves of a batch do not give that "
        "of the batch, as where samples are compared with one another, or divided by a sum over them. Each rank "
        "computes it for its own samples alone. To compare all of them, gather what is compared: "
        "hvdtrain.all_gather(embeddings)."
    )


def _of_outputs(model: Any) -> str:
    return (
        f"warning: the outputs of {type(model).__name__} {model.name!r} for some samples are others beside other "
        "samples, as where a layer takes statistics of a batch: halves of a batch do not give those of the batch. Each "
        "rank computes them for its own samples alone. To take them of all, gather them in the layer's call: "
        "hvdtrain.all_gather(x)."
    )


def may_form_sums(model: Any) -> bool:
    """Return whether code that is not Keras' forms numbers of the samples: a step, a loss, a layer that adds one."""
    return reads_outputs(model) or any(_adds_losses(layer) for layer in flatten_layers(model))
