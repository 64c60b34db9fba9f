"""Layers of experts, which send each position to its experts by itself."""

from typing import Any

from hvdtrain.layers.experts.mixture import MixtureOfExperts
from hvdtrain.parallel.context.group import Group
from hvdtrain.parallel.context.positions import POSITION_DIM
from hvdtrain.parallel.tensor.layers.base import calls_as, described, replace_call


def is_experts(layer: Any) -> bool:
    """Whether a layer is a mixture of experts that calls them as ours does."""
    return calls_as(layer, MixtureOfExperts)


def note_experts(layer: Any, group: Group) -> None:
    """Let `layer` note that it takes and gives slices.

    It is not given whole sequences: each rank would send the same tokens, and they would count several times.
    """
    whole_call = layer.call

    def call(inputs: Any, *args: Any, **options: Any) -> Any:
        with group.record.call(described(layer)) as flow:
            outputs = whole_call(inputs, *args, **options)
            if group.cuts:
                place = POSITION_DIM - inputs.shape.rank
                flow.takes.append((inputs, place))
                flow.gives.append((outputs, place))
            return outputs

    replace_call(layer, call)
