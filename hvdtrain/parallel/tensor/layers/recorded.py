"""Layers that record their calls while they are whole still."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hvdtrain.parallel.tensor.flow.record import FlowRecord
from hvdtrain.parallel.tensor.layers.base import described, replace_call
from hvdtrain.parallel.tensor.layers.outputs import recording_output


@contextmanager
def recorded(layers: Sequence[Any], outputs: Sequence[Any], record: FlowRecord) -> Iterator[None]:
    """Record the calls of `layers` inside this context, and what the layers of `outputs` give."""
    for layer in layers:
        replace_call(layer, _recording(layer, layer.call, record))
    for layer in outputs:
        replace_call(layer, recording_output(layer, layer.call, record))
    try:
        yield
    finally:
        for layer in [*layers, *outputs]:
            vars(layer).pop("call", None)


def _recording(layer: Any, call: Callable[..., Any], record: FlowRecord) -> Callable[..., Any]:
    def recording(*args: Any, **options: Any) -> Any:
        with record.call(described(layer)):
            return call(*args, **options)

    return recording
