"""Outputs of a model as this rank has them, where it has a part of them alone."""

from collections.abc import Callable
from typing import Any

from hvdtrain.parallel.context.positions import position_slices, sliced_outputs
from hvdtrain.parallel.tensor.outputs import gathered, sharded_outputs, tagged_outputs


def local_outputs(model: Any, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `forward`, which is `model` or calls its layers, and leave this rank's slices of the outputs as they are.

    They are marked: see `shard_of` for slices along the last dim, and `positions_of` for slices of a sequence.
    """

    def sharded(*inner: Any, **more: Any) -> Any:
        return sharded_outputs(model, forward, *inner, **more)

    return sliced_outputs(model, sharded, *args, **options)


def marked_outputs(model: Any, outputs: Any) -> Any:
    """Mark the slices among `outputs`, which the layers of `model` have given one by one; see `local_outputs`."""
    slices = position_slices(model)
    marked = tagged_outputs(model, outputs)
    return marked if slices is None else slices.tagged(marked)


def whole_outputs(model: Any, outputs: Any) -> Any:
    """Return the whole of `outputs` that are marked; every rank that has a slice calls it."""
    slices = position_slices(model)
    features = gathered(outputs)
    return features if slices is None else slices.gathered(features)
