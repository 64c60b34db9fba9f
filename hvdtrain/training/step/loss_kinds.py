"""Which numbers of a step are means over its samples, and which are sums."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import Batch, part_of
from hvdtrain.runtime.compiled import run_once
from hvdtrain.training.step.batches import number_of_samples, reads_outputs
from hvdtrain.training.step.graphs import draws, exchanges
from hvdtrain.training.step.logs import StepLogs, metrics_of
from hvdtrain.training.step.loss_terms import MEANS, Kind, Kinds, LossTerms, averaging, differentiating, means_of
from hvdtrain.training.step.patches import replaced, replaced_in_this_thread

TOLERANCE = 0.25
"""Deviation from 1 or 2 where a step draws random numbers, as dropout does: others for twice the samples."""
EXACT = 1e-2
"""Deviation where it draws none, in 16 bits, too."""
_CODES: Sequence[Kind | None] = ("mean", "sum", None)
_HIDDEN = "hidden"
"""Name of a number that is formed in an inner function."""


class _Number(NamedTuple):
    """A number that a step forms."""

    role: str
    """Field of `Kinds`."""
    name: str
    value: tf.Tensor | float


def kinds_of(
    model: Any, batch: Batch, step: Callable[[Batch], Any], logs: StepLogs, replicas: Backend
) -> tuple[Kinds, list[str]]:
    """Return the kinds of the numbers that `step` forms, and warnings of those that are of neither kind. Collective.

    Each is computed for a batch, and for twice the same samples: a mean stays, a sum doubles. Anything else, such as a
    loss over pairs of samples, depends on which samples are together. A mean over all pairs stays, too, and is not told
    from one over samples.

    Args:
        step: computes a batch as in training, without changing weights.
        logs: tells metrics' results from other numbers.
        replicas: agree on the kinds.

    Raises:
        ConfigError: a layer adds a loss that is neither, and cannot be put together from those of slices.
    """
    formed: list[_Number] = []
    batch = batch._replace(has_samples=1.0)

    def numbers(batch: Batch, total: tf.Tensor) -> list[tf.Tensor]:
        formed[:] = _formed(model, batch, total=total, step=step, logs=logs)
        return [tf.cast(each.value, tf.float64) for each in formed]

    compute = tf.function(numbers, autograph=False)
    graph = compute.get_concrete_function(batch, 2 * number_of_samples(batch)).graph
    if exchanges(graph):
        return Kinds(exchanged=True), []
    half = part_of(batch, lambda count: (0, max(1, count // 2)))  # twice a batch may not fit in memory
    if not formed or half is None:
        return MEANS, []
    total = 2 * number_of_samples(half)
    exact = not draws(graph)
    with unchanged(model):
        once, twice = compute(half, total), compute(_doubled(half), total)
    codes = [_code(float(a), float(b), EXACT if exact else TOLERANCE) for a, b in zip(once, twice, strict=True)]
    kinds = [_CODES[code] for code in _agreed(codes, replicas)]
    for number, kind, before, after in zip(formed, kinds, once, twice, strict=True):
        if kind is None and number.role == "added":
            raise _refusal(number.name, float(before), float(after))
    known = list(zip(formed, kinds, strict=True))

    def of(role: str) -> tuple[Kind, ...]:
        return tuple(kind or "mean" for number, kind in known if number.role == role)

    sums = frozenset(number.name for number, kind in known if number.role == "figures" and kind == "sum")
    neither = exact and any(number.role == "targets" and kind is None for number, kind in known)
    found = Kinds(added=of("added"), targets=of("targets"), means=of("means"), figures=sums)
    hidden = sums and any(number.role == "targets" and number.name == _HIDDEN for number in formed)
    return found, [_of_pairs(model)] * neither + [_of_hidden_sum(model, sums)] * bool(hidden)


def may_form_sums(model: Any) -> bool:
    """Return whether code that is not Keras' forms numbers of the samples: a step, a loss, a layer that adds one."""
    return reads_outputs(model) or any(_adds_losses(layer) for layer in flatten_layers(model))


def _formed(
    model: Any, batch: Batch, *, total: tf.Tensor, step: Callable[[Batch], Any], logs: StepLogs
) -> list[_Number]:
    """Return the numbers that `step` forms of a batch, of `total` samples in all."""
    found: list[_Number] = []
    graph = tf.compat.v1.get_default_graph()

    def note(role: str, name: str, value: Any) -> None:
        # A number of a function, loop or branch in the step cannot be looked at from here, and is taken for a mean.
        if tf.compat.v1.get_default_graph() is graph:
            found.append(_Number(role, name, tf.add_n([tf.reduce_sum(each) for each in tf.nest.flatten(value)])))
        else:
            found.append(_Number(role, _HIDDEN, 0.0))

    def add_loss(layer: Any, loss: Any) -> None:
        name = f"{type(layer).__name__} {layer.name!r}"
        for term in tf.nest.flatten(loss):
            note("added", name, term)

    def upstream(target: Any, given: Any) -> Any:
        note("targets", "loss", target)
        return given

    def counted(value: tf.Tensor, weight: Any) -> tuple[tf.Tensor, Any]:
        note("means", "metric", value)
        return value, weight

    terms = LossTerms(
        model=model,
        collectives=NoOpCollectives(),
        samples=number_of_samples(batch),
        total=total,
        whole=False,
        exchanges=True,
    )
    with ExitStack() as stack:
        stack.enter_context(terms.corrected())
        stack.enter_context(replaced_in_this_thread(keras.layers.Layer, "add_loss", add_loss))
        stack.enter_context(differentiating(model, upstream))
        for metric in means_of(model):
            stack.enter_context(replaced(metric, "update_state", averaging(metric, counted)))
        stack.enter_context(logs.recording())
        returned = step(batch)
        if isinstance(returned, dict):
            found.extend(_Number("figures", name, value) for name, value in logs.own_numbers(returned).items())
    return found


def _doubled(batch: Batch) -> Batch:
    samples = (batch.inputs, batch.targets, batch.sample_weight)
    inputs, targets, weights = tf.nest.map_structure(lambda each: None if each is None else _twice(each), samples)
    return batch._replace(inputs=inputs, targets=targets, sample_weight=weights)


def _twice(value: Any) -> Any:
    return tf.sparse.concat(0, [value] * 2) if isinstance(value, tf.SparseTensor) else tf.concat([value] * 2, 0)


def _code(once: float, twice: float, tolerance: float) -> int:
    ratio = twice / once if once else 1.0
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


def _adds_losses(layer: Any) -> bool:
    """Return whether a layer, not of Keras' own, may add losses in its call."""
    own = type(layer).__module__.split(".")[0] not in ("keras", "hvdtrain")
    return own and not isinstance(layer, keras.layers.InputLayer)


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Restore after the context what a call has changed: statistics, generators, metrics."""
    changing = [*model.non_trainable_variables, *(v for metric in metrics_of(model) for v in metric.variables)]
    before = [np.asarray(variable) for variable in changing]
    yield
    for variable, value in zip(changing, before, strict=True):
        variable.assign(value)


def _refusal(layer: str, once: float, twice: float) -> ConfigError:
    return ConfigError(
        f"{layer} adds a loss that is neither a mean nor a sum over the samples, "
        f"of which each rank has some. Received: {once:g} for a batch, {twice:g} for twice its samples. Add a mean, "
        "such as keras.ops.mean(keras.ops.square(x))."
    )


def _of_pairs(model: Any) -> str:
    return (
        f"warning: the loss of {type(model).__name__} is neither a mean nor a sum over the samples: of twice the same "
        "samples it is neither the same nor twice as large, as where samples of a batch are compared with one another. "
        "Each rank compares its own alone. To compare all of them, gather what is compared: "
        "hvdtrain.all_gather(embeddings)."
    )


def _of_hidden_sum(model: Any, sums: Iterable[str]) -> str:
    return (
        f"warning: train_step of {type(model).__name__} returns a sum over the samples ({', '.join(sorted(sums))}) and "
        "differentiates within a tf.function, where it cannot be seen whether the loss is a sum, too: its gradient "
        "would be that of a rank's samples alone. Leave out @tf.function there, or use a mean."
    )
