"""Outputs of a model as this rank has them, where it has a part of them alone."""

from collections.abc import Callable
from typing import Any

from hvdtrain.parallel.context.positions import sliced_outputs
from hvdtrain.parallel.tensor.outputs import sharded_outputs


def local_outputs(model: Any, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `forward`, which is `model` or calls its layers, and leave this rank's slices of the outputs as they are.

    They are marked: see `shard_of` for slices along the last dim, and `positions_of` for slices of a sequence.
    """

    def sharded(*inner: Any, **more: Any) -> Any:
        return sharded_outputs(model, forward, *inner, **more)

    return sliced_outputs(model, sharded, *args, **options)
