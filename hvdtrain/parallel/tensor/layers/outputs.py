"""Layers whose output a rule cuts along the sequence, or puts together again."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.backends.differentiable import gather_from, slice_to
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.parallel.tensor.flow.record import BY_OUTPUT_RULE, FlowRecord
from hvdtrain.parallel.tensor.flow.trace import shown
from hvdtrain.parallel.tensor.layers.base import SEQUENCE_DIM, Group, described, replace_call
from hvdtrain.runtime.compiled import numbered


def cut_output(layer: Any, group: Group, name: str, *, whole: bool) -> None:
    """Let `layer` give slices of the sequence, or all of it where it would give a slice.

    Args:
        layer: what it computes stays as it is.
        group: the ranks.
        name: of the layer, the same on all ranks.
        whole: whether it gives all of the sequence.
    """
    call = layer.call

    def cutting(*args: Any, **options: Any) -> Any:
        outputs = call(*args, **options)
        with group.record.call(described(layer) + BY_OUTPUT_RULE) as flow:
            if whole:
                flow.takes.append((outputs, SEQUENCE_DIM - outputs.shape.rank))
                return gather_from(outputs, group.exchange, SEQUENCE_DIM, name=numbered(f"{name}/gathered"))
            _check_length(layer, outputs, group.exchange.size)
            outputs = slice_to(outputs, group.exchange, SEQUENCE_DIM, name=numbered(f"{name}/cut"))
            flow.gives.append((outputs, SEQUENCE_DIM - outputs.shape.rank))
            return outputs

    replace_call(layer, cutting)


def recording_output(layer: Any, call: Callable[..., Any], record: FlowRecord) -> Callable[..., Any]:
    """Return `call` of a layer that gives its output whole still, with a mark of the place where it will be cut."""

    def recording(*args: Any, **options: Any) -> Any:
        outputs = call(*args, **options)
        with record.call(described(layer) + BY_OUTPUT_RULE):
            return tf.identity(outputs)

    return recording


def _check_length(layer: Any, outputs: Any, ranks: int) -> None:
    length = outputs.shape[SEQUENCE_DIM] if outputs.shape.rank == 3 else None
    if length is None or length % ranks:
        raise ConfigError(
            f"{opt('sequence_parallel')} cuts the output of {described(layer)} along the sequence, which tp={ranks} "
            "must "
            f"divide. Received: the shape {shown(outputs.shape)} [batch, sequence, features]."
        )
