"""Model outputs of which a rank may hold only a shard."""

from collections.abc import Callable
from typing import Any

from hvdtrain.parallel.context.positions import position_slices, sliced_outputs
from hvdtrain.parallel.tensor.outputs import gathered, output_shards, sharded_outputs, tagged_outputs


def local_outputs(model: Any, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `forward`, the model or its layers, keeping outputs sharded and marked.

    `shard_of` returns the mark of a shard along the last dim, `positions_of` that of a shard of the sequence.
    """

    def sharded(*inner: Any, **more: Any) -> Any:
        return sharded_outputs(model, forward, *inner, **more)

    return sliced_outputs(model, sharded, *args, **options)


def holds_output_slices(model: Any) -> bool:
    """Return whether `local_outputs` of `model` may be shards."""
    return position_slices(model) is not None or output_shards(model) is not None


def marked_outputs(model: Any, outputs: Any) -> Any:
    """Mark the shards among outputs that layers returned one by one."""
    slices = position_slices(model)
    marked = tagged_outputs(model, outputs)
    return marked if slices is None else slices.tagged(marked)


def whole_outputs(model: Any, outputs: Any) -> Any:
    """All-gather marked outputs. Collective over the ranks that hold shards."""
    slices = position_slices(model)
    features = gathered(outputs)
    return features if slices is None else slices.gathered(features)
