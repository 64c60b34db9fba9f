"""Tell numbers of a step that are means over its samples from sums."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.tensorflow import compiled
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import Batch, part_of
from hvdtrain.runtime.compiled import run_once
from hvdtrain.training.step.batches import number_of_samples
from hvdtrain.training.step.logs import StepLogs
from hvdtrain.training.step.loss_terms import MEANS, Kind, Kinds
from hvdtrain.training.step.probing import (
    EXACT,
    HIDDEN,
    Number,
    adds_up,
    draws,
    exchanges,
    formed_by,
    halves_of,
    mixes_by_design,
    unchanged,
)
from hvdtrain.training.step.samples_apart import of_pairs

TOLERANCE = 0.25
"""Deviation from 1 or 2 where a step draws random numbers, as dropout does: others for twice the samples."""
_CODES: Sequence[Kind | None] = ("mean", "sum", None)


def kinds_of(
    model: Any, batch: Batch, step: Callable[..., Any], logs: StepLogs, replicas: Backend
) -> tuple[Kinds, list[str]]:
    """Return the kinds of the numbers that `step` forms, and warnings of those that are of neither kind. Collective.

    Each is computed for half a batch, and for twice the same samples: a mean stays, a sum doubles. Anything else, such
    as a loss over pairs of samples, depends on which samples are together. A mean over all pairs stays, too: it is not
    the mean of those of the batch's halves.

    Args:
        step: computes a batch as in training, without changing weights; `noted` is given what optimizers apply.
        logs: tells metrics' results from other numbers.
        replicas: agree on the kinds.

    Raises:
        ConfigError: a layer adds a loss that is neither, and cannot be put together from those of slices.
    """
    formed: list[Number] = []
    batch = batch._replace(has_samples=1.0)

    def numbers(batch: Batch, total: tf.Tensor) -> list[tf.Tensor]:
        formed[:] = formed_by(model, batch, total=total, step=step, logs=logs)
        return [tf.cast(each.value, tf.float64) for each in formed]

    compute = compiled(numbers)
    graph = compute.get_concrete_function(batch, 2 * number_of_samples(batch)).graph
    if exchanges(graph):
        return Kinds(exchanged=True), []
    half = part_of(batch, lambda count: (0, max(1, count // 2)))  # twice a batch may not fit in memory
    if not formed or half is None:
        return MEANS, []
    total = 2 * number_of_samples(half)
    exact = not draws(graph)

    def of(*parts: Batch) -> list[list[float]]:
        with unchanged(model, graph):
            return [[float(each) for each in compute(part, total)] for part in parts]

    once, twice = of(half, _doubled(half))
    codes = [_code(a, b, EXACT if exact else TOLERANCE) for a, b in zip(once, twice, strict=True)]
    kinds = [_CODES[code] for code in _agreed(codes, replicas)]
    for number, kind, before, after in zip(formed, kinds, once, twice, strict=True):
        if kind is None and number.role == "added":
            raise _refusal(number.name, before, after)
    known = list(zip(formed, kinds, strict=True))

    def kinds_in(role: str) -> tuple[Kind, ...]:
        return tuple(kind or "mean" for number, kind in known if number.role == role)

    sums = frozenset(number.name for number, kind in known if number.role == "figures" and kind == "sum")
    targets = [index for index, number in enumerate(formed) if number.role == "targets"]
    applied = [index for index, number in enumerate(formed) if number.role == "applied"]
    neither = exact and any(kinds[index] is None for index in targets)
    changed = exact and any(kinds[index] is None for index in applied)
    if exact and targets and not neither and not mixes_by_design(model, formed) and (halves := halves_of(batch)):
        first, second, whole = (of(part)[0] for part in halves)
        apart = {i for i in (*targets, *applied) if not adds_up(first[i], second[i], whole[i], mean=kinds[i] == "mean")}
        neither, changed = not apart.isdisjoint(targets), changed or not apart.isdisjoint(applied)
    found = Kinds(added=kinds_in("added"), targets=kinds_in("targets"), means=kinds_in("means"), figures=sums)
    hidden = sums and any(number.role == "targets" and number.name == HIDDEN for number in formed)
    warnings = [of_pairs(f"of {type(model).__name__}")] if neither else [_of_gradients(model)] * changed
    derived = [number.name for number in formed if number.role == "derived"]
    warnings += [_of_derived(model, derived)] * bool(derived)
    return found, warnings + [_of_hidden_sum(model, sums)] * bool(hidden)


def _doubled(batch: Batch) -> Batch:
    samples = (batch.inputs, batch.targets, batch.sample_weight)
    inputs, targets, weights = tf.nest.map_structure(lambda each: None if each is None else _twice(each), samples)
    return batch._replace(inputs=inputs, targets=targets, sample_weight=weights)


def _twice(value: Any) -> Any:
    return tf.sparse.concat(0, [value] * 2) if isinstance(value, tf.SparseTensor) else tf.concat([value] * 2, 0)


def _code(once: float, twice: float, tolerance: float) -> int:
    # Of gradients that overflow, as those of a scaled loss at first, nothing is known.
    ratio = twice / once if once and math.isfinite(once) and math.isfinite(twice) else 1.0
    found = "mean" if abs(ratio - 1.0) < tolerance else "sum" if abs(ratio - 2.0) < 2 * tolerance else None
    return _CODES.index(found)


def _agreed(codes: Sequence[int], replicas: Backend) -> list[int]:
    """Return the largest code that any replica found, for each number."""
    if replicas.size == 1:
        return list(codes)
    agreed = tf.Variable(codes, dtype=tf.int32)
    run_once(
        lambda: replicas.run(lambda: agreed.assign(replicas.all_reduce(agreed.read_value(), name="kinds", op="max")))
    )
    return [int(code) for code in agreed.numpy()]


def _refusal(layer: str, once: float, twice: float) -> ConfigError:
    cure = "Add a mean, such as keras.ops.mean(keras.ops.square(x))."
    if 0.49 < twice / (once or 1.0) < 0.51:
        cure = "Keras divides what an activity regularizer returns by the samples: return a sum of values of samples."
    return ConfigError(
        f"{layer} adds a loss that is neither a mean nor a sum over the samples, "
        f"of which each rank has some. Received: {once:g} for a batch, {twice:g} for twice its samples. {cure}"
    )


def _of_gradients(model: Any) -> str:
    return (
        f"warning: train_step of {type(model).__name__} applies gradients of which those of a batch are none of those "
        "of its halves, as where they are clipped or normalized before optimizer.apply: each rank does so with its "
        "own, and the mean of them is applied. To clip what all ranks have together, give the optimizer "
        "global_clipnorm, clipnorm or clipvalue."
    )


def _of_derived(model: Any, names: Sequence[str]) -> str:
    return (
        f"warning: train_step of {type(model).__name__} computes {', '.join(names)} from results of metrics, which are "
        "those of a rank's own samples there, and are counted over all ranks afterwards. Compute it in the result() of "
        "a metric."
    )


def _of_hidden_sum(model: Any, sums: Iterable[str]) -> str:
    return (
        f"warning: train_step of {type(model).__name__} returns a sum over the samples ({', '.join(sorted(sums))}) and "
        "differentiates within a tf.function, where it cannot be seen whether the loss is a sum, too: its gradient "
        "would be that of a rank's samples alone. Leave out @tf.function there, or use a mean."
    )
