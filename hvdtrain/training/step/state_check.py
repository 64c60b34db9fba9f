"""Verify that states of users' layers may be averaged over ranks, as each rank updates them from its own samples."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import flatten_layers, own_non_trainable_variables
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import Batch, part_of, rows_of, samples_in
from hvdtrain.state.structure import statistics_of
from hvdtrain.state.variables import path_of, unwrap
from hvdtrain.training.step.graphs import draws, exchanges
from hvdtrain.training.step.loss_kinds import unchanged

TOLERANCE = 1e-3


def check_states(model: Any, batch: Batch, step: Callable[[Batch], Any]) -> None:
    """Reject states of layers that are no means over samples, such as a largest value, unless the layer says how.

    The state after a batch must be the mean of those after its halves; `add_weight(aggregation="mean")` says that a
    mean will do, as for the variances of a normalization, and `"only_first_replica"` that rank 0's is that of all.

    Args:
        batch: a representative one.
        step: computes a batch as in training, without changing weights.

    Raises:
        ConfigError: naming the layer and the variable.
    """
    found = list(_states(model))
    first = part_of(batch, lambda count: (0, count // 2))
    second = part_of(batch, lambda count: (count // 2, count // 2 * 2))
    whole = part_of(batch, lambda count: (0, count // 2 * 2))
    if not found or first is None or second is None or whole is None or not int(rows_of(samples_in(whole))):
        return

    def states(batch: Batch) -> list[tf.Tensor]:
        step(batch)
        return [tf.cast(unwrap(variable).read_value(), tf.float64) for _, variable in found]

    compute = tf.function(states, autograph=False)
    graph = compute.get_concrete_function(first).graph
    if draws(graph) or exchanges(graph):
        return
    results = []
    for part in (first, second, whole):
        with unchanged(model, graph):
            results.append(compute(part))
    for (layer, variable), one, other, both in zip(found, *results, strict=True):
        if tf.reduce_any(abs((one + other) / 2 - both) > TOLERANCE * (abs(both) + 1e-6)):
            raise ConfigError(
                f"{type(layer).__name__} {layer.name!r} updates {path_of(variable)} from the samples of its rank, "
                "and the mean over the ranks is not its value for all samples. Say what it shall be: "
                'add_weight(…, aggregation="mean") if the mean will do, or "only_first_replica"; or exchange it in the '
                "layer, as by hvdtrain.allreduce(x, op=hvdtrain.horovod.Max)."
            )


def _states(model: Any) -> Iterator[tuple[Any, Any]]:
    """Yield layers that are not Keras' own with the states for which they name no aggregation."""
    for layer in {id(layer): layer for layer in flatten_layers(model)}.values():
        if type(layer).__module__.split(".")[0] in ("keras", "hvdtrain"):
            continue
        averaged = {id(variable) for variable in statistics_of(layer)}
        for variable in own_non_trainable_variables(layer):
            known = getattr(variable, "aggregation", None) not in (None, "none")
            if id(unwrap(variable)) in averaged and not known and isinstance(variable, keras.Variable):
                yield layer, variable
