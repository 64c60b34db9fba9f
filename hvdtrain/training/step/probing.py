"""Look at the numbers that a step forms of a batch, without changing the model."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.compat.keras import divisor_of, flatten_layers, module_of_losses
from hvdtrain.compat.tensorflow import not_only_read
from hvdtrain.data.batch import Batch, part_of, rows_of, samples_in
from hvdtrain.state.variables import restoring, unwrap
from hvdtrain.training.step.batches import number_of_samples
from hvdtrain.training.step.logs import StepLogs, metrics_of
from hvdtrain.training.step.loss_terms import (
    Gradients,
    Kinds,
    LossTerms,
    averaging,
    differentiating,
    means_of,
    trained_ids,
)
from hvdtrain.training.step.patches import active, replaced

EXACT = 1e-2
"""Deviation of a number where a step draws no random numbers, in 16 bits, too."""
DIVIDED = "divided"
"""Name of a loss that is divided by its own weights."""
HIDDEN = "hidden"
"""Name of a number that is formed in an inner function."""


class Number(NamedTuple):
    """A number that a step forms."""

    role: str
    """Field of `Kinds`; `applied`: a gradient; `divisor`, `derived`: a loss or a figure to be told of."""
    name: str
    value: tf.Tensor | float


def formed_by(model: Any, batch: Batch, *, total: tf.Tensor, step: Callable[..., Any], logs: StepLogs) -> list[Number]:
    """Return the numbers that `step` forms of a batch, of `total` samples in all."""
    found: list[Number] = []
    graph = tf.compat.v1.get_default_graph()

    def note(role: str, name: str, value: Any) -> None:
        # A number of a function, loop or branch in the step cannot be looked at from here, and is taken for a mean.
        if tf.compat.v1.get_default_graph() is graph:
            parts = [tf.reduce_sum(each) for each in tf.nest.flatten(value)]
            found.append(Number(role, name, tf.add_n(parts) if parts else 0.0))
        else:
            found.append(Number(role, HIDDEN, 0.0))

    def add_loss(layer: Any, loss: Any) -> None:
        for term in tf.nest.flatten(loss):
            note("added", described(layer), term)

    def differentiated(own: Gradients, target: Any, sources: Any, upstream: Any) -> Any:
        note("targets", "loss", target)
        return own(target, sources, upstream)

    def counted(value: tf.Tensor, weight: Any) -> tuple[tf.Tensor, Any]:
        note("means", "metric", value)
        return value, weight

    terms = LossTerms(
        model=model,
        collectives=NoOpCollectives(),
        samples=number_of_samples(batch),
        total=total,
        whole=False,
        divisors="exchanged",
        kinds=Kinds(batch_means=True),
    )
    with ExitStack() as stack:
        stack.enter_context(terms.corrected())
        original = active(module_of_losses(), "reduce_weighted_values")

        def reduced(
            values: Any,
            sample_weight: Any = None,
            mask: Any = None,
            reduction: Any = "sum_over_batch_size",
            dtype: Any = None,
        ) -> Any:
            if divisor_of(sample_weight, mask, reduction, tf.float64) is not None:
                found.append(Number("divisor", DIVIDED, 0.0))
            return original(values, sample_weight, mask, reduction, dtype)

        stack.enter_context(replaced(module_of_losses(), "reduce_weighted_values", reduced))
        stack.enter_context(replaced(keras.layers.Layer, "add_loss", add_loss))
        stack.enter_context(differentiating(trained_ids(model), differentiated))
        for metric in means_of(model):
            stack.enter_context(replaced(metric, "update_state", averaging(metric, counted)))
        stack.enter_context(logs.recording())
        returned = step(batch, noted=lambda name, gradients: note("applied", name, _projections(gradients)))
        if isinstance(returned, dict):
            figures = logs.own_numbers(returned)
            found.extend(Number("figures", name, value) for name, value in figures.items())
            found.extend(
                Number("derived", name, 0.0) for name, value in figures.items() if _reads_metrics(value, model)
            )
    return found


def _reads_metrics(value: tf.Tensor, model: Any) -> bool:
    """Return whether a tensor of the graph that is being traced is computed from states of metrics."""
    states = {id(unwrap(variable).handle) for metric in metrics_of(model) for variable in metric.variables}
    held = {id(inner) for outer, inner in value.graph.captures if id(outer) in states}
    waiting: list[Any] = [value.op]
    seen: set[int] = set()
    while waiting:
        op = waiting.pop()
        if any(id(tensor) in held for tensor in op.inputs):
            return True
        new = {id(tensor.op): tensor.op for tensor in op.inputs if id(tensor.op) not in seen}
        seen |= new.keys()
        waiting += new.values()
    return False


def _projections(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Return a number for each gradient that is linear in it: its product with uneven factors."""
    found = [
        tf.reshape(tf.cast(tf.convert_to_tensor(each), tf.float64), [-1]) for each in gradients if each is not None
    ]
    # Not random numbers, by which a step that draws some is known.
    return [tf.reduce_sum(each * tf.cos(17.3 * tf.cast(tf.range(tf.size(each)), tf.float64) ** 2)) for each in found]


def described(layer: Any) -> str:
    """Return the name of a layer in messages."""
    return f"{type(layer).__name__} {layer.name!r}"


def halves_of(batch: Batch) -> tuple[Batch, Batch, Batch] | None:
    """Return the first and the second half of a batch, and both; None if there are not two samples."""
    first = part_of(batch, lambda count: (0, count // 2))
    second = part_of(batch, lambda count: (count // 2, count // 2 * 2))
    whole = part_of(batch, lambda count: (0, count // 2 * 2))
    if first is None or second is None or whole is None or not int(rows_of(samples_in(whole))):
        return None
    return first, second, whole


def adds_up(first: float, second: float, whole: float, *, mean: bool, tolerance: float = EXACT) -> bool:
    """Return whether the number of a batch is the mean, or the sum, of those of its halves, as far as it is known."""
    if not np.isfinite([first, second, whole]).all():
        return True
    expected = (first + second) / 2 if mean else first + second
    return abs(whole - expected) <= tolerance * max(abs(first), abs(second), abs(whole))


def mixes_by_design(model: Any, formed: Sequence[Number]) -> bool:
    """Return whether statistics of a batch, or divisors that are corrected, keep halves from adding up."""
    normalized = any(isinstance(layer, keras.layers.BatchNormalization) for layer in flatten_layers(model))
    return normalized or any(number.name == DIVIDED for number in formed)


def unchanged(model: Any, graph: Any) -> AbstractContextManager[None]:
    """Return a context that restores what a call has changed.

    Statistics, generators, metrics, variables of a step's own: what `graph`, that of the call, may assign to.
    """
    held = [*model.non_trainable_variables, *(v for metric in metrics_of(model) for v in metric.variables)]
    known = {id(unwrap(variable)): unwrap(variable) for variable in [*held, *graph.variables]}
    return restoring(not_only_read(graph, known.values()))


def draws(graph: Any) -> bool:
    """Return whether random numbers are drawn."""
    return any("Random" in operation for operation in _operations(graph))


def exchanges(graph: Any) -> bool:
    """Return whether something is exchanged with other ranks."""
    return any(operation.startswith("Horovod") for operation in _operations(graph))


def _operations(graph: Any) -> Iterable[str]:
    definition = graph.as_graph_def()
    return {
        node.op for nodes in (definition.node, *(f.node_def for f in definition.library.function)) for node in nodes
    }
