"""Dense layers, which compute each position from itself alone."""

from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.parallel.context.cuts import all_but_last
from hvdtrain.parallel.context.group import Group
from hvdtrain.parallel.tensor.layers.base import calls_as, described, replace_call


def is_dense(layer: Any) -> bool:
    """Whether a layer is a Dense or EinsumDense of Keras'."""
    return calls_as(layer, keras.layers.Dense) or calls_as(layer, keras.layers.EinsumDense)


def note_dense(layer: Any, group: Group) -> None:
    """Let `layer` note which dims of its input it passes on."""
    call = layer.call

    def noting(inputs: Any, *args: Any, **options: Any) -> Any:
        with group.record.call(described(layer)) as flow:
            outputs = call(inputs, *args, **options)
            flow.passes.append((inputs, outputs, _passed_on(layer, inputs)))
            return outputs

    replace_call(layer, noting)


def _passed_on(layer: Any, inputs: Any) -> Callable[[int], int | None]:
    """Return the function from a dim of the input to where it is in the output; None of one that is summed over."""
    if not isinstance(layer, keras.layers.EinsumDense):
        return all_but_last(inputs)
    taken, output = layer.equation.replace(" ", "").split("->")
    term, kernel = taken.split(",")
    if "..." in term:
        return lambda dim: dim if dim == 1 and term.startswith("...") and output.startswith("...") else None
    activation_mixes = getattr(layer.activation, "__name__", "") in ("softmax", "log_softmax", "sparsemax")

    def place(dim: int) -> int | None:
        label = term[dim]
        if label in kernel or label not in output:
            return None
        where = output.index(label)
        return None if activation_mixes and where == len(output) - 1 else where

    return place
