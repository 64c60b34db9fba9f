"""Metrics of one's own, which must be sums where each replica counts its own samples."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import function_of_metric
from hvdtrain.compat.seams import VARIABLE
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.state.variables import unwrap

_SAME = ("Identity", "Cast")
_SUMS = {"AddV2": 2, "Add": 2, "AddN": None, "Sub": 1}
"""Operations of sums, and how many of their first inputs the variable may be; None: all."""


def is_own_metric(metric: Any) -> bool:
    """Return whether a metric, or a function that is one, is not Keras' own."""
    function = function_of_metric(metric) if isinstance(metric, keras.metrics.Metric) else metric
    return is_foreign(metric) or (function is not None and is_foreign(function))


def is_foreign(thing: Any) -> bool:
    """Return whether an object or a function is neither Keras', KerasHub's nor ours."""
    module = getattr(thing, "__module__", type(thing).__module__)  # of a function, its own
    return str(module).split(".")[0] not in ("keras", "keras_hub", "hvdtrain")


@contextmanager
def only_added_to(metrics: Iterable[Any]) -> Iterator[None]:
    """Refuse what makes the variables of `metrics` no sums over samples, while a step is traced.

    Raises ConfigError naming the metric, where a variable is assigned anything but itself and a term without it.
    """
    with ExitStack() as stack:
        for metric in metrics:
            for variable in metric.variables:
                assign = partial(_assigned, metric, variable, variable.assign)
                stack.enter_context(VARIABLE.replaced(variable, assign))
        yield


def _assigned(metric: Any, variable: Any, assign: Any, value: Any) -> Any:
    """Assign `value` if that adds to the variable; Keras' `assign_add` comes here, too."""
    graph = tf.compat.v1.get_default_graph()
    if isinstance(graph, tf.__internal__.FuncGraph) and not _adds(value, graph.capture(unwrap(variable).handle)):
        raise ConfigError(
            f"Each rank counts its own samples here, and variables of metrics are added up. Received: {metric.name!r}, "
            f"a {type(metric).__name__}, which changes its variable {variable.name!r} otherwise than by adding to it. "
            f"Leave out what keeps the step from the whole batch, such as {opt('whole_batch', False)}; or keep sums "
            "over samples, by self.variable.assign_add(…)."
        )
    return assign(value)


def _adds(value: Any, handle: Any) -> bool:
    source = _source(value)
    if source is None or source.type not in _SUMS:
        return False
    terms = [_source(term) for term in source.inputs]
    reads = [_reads(term, handle) for term in terms]
    return sum(reads[: _SUMS[source.type]]) == 1 == sum(reads) and not any(
        _depends(term, handle) for term, read in zip(terms, reads, strict=True) if not read
    )


def _source(tensor: Any) -> Any:
    """Return the operation that computes a symbolic tensor, apart from copies and casts."""
    op = getattr(tensor, "op", None)
    while op is not None and op.type in _SAME:
        op = op.inputs[0].op
    return op


def _reads(op: Any, handle: Any) -> bool:
    return bool(op.type == "ReadVariableOp" and op.inputs[0] is handle)


def _depends(op: Any, handle: Any) -> bool:
    """Return whether a term is computed from the variable, anywhere in this graph."""
    seen, rest = set(), [op]
    while rest:
        op = rest.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if any(each is handle for each in op.inputs):
            return True
        rest += [each.op for each in op.inputs]
    return False
