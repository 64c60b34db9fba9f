"""Model outputs of which a rank may hold only a shard."""

from collections.abc import Callable
from functools import partial
from typing import Any

from hvdtrain.parallel.context.positions import PositionSlices
from hvdtrain.parallel.tensor.outputs import OutputLayout, OutputShards, gathered, kept_outputs

_KINDS: tuple[type[OutputLayout], ...] = (OutputShards, PositionSlices)


def local_outputs(model: Any, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `forward`, the model or its layers, keeping outputs sharded and marked.

    `shard_of` returns the mark of a shard along the last dim, `positions_of` that of a shard of the sequence.
    """

    return kept_outputs(PositionSlices, model, partial(kept_outputs, OutputShards, model, forward), *args, **options)


def holds_output_slices(model: Any) -> bool:
    """Return whether `local_outputs` of `model` may be shards."""
    return any(kind.of(model) is not None for kind in _KINDS)


def marked_outputs(model: Any, outputs: Any) -> Any:
    """Mark the shards among outputs that layers returned one by one."""
    for kind in _KINDS:
        layout = kind.of(model)
        outputs = outputs if layout is None else layout.tagged(outputs)
    return outputs


def whole_outputs(model: Any, outputs: Any) -> Any:
    """All-gather marked outputs. Collective over the ranks that hold shards."""
    slices = PositionSlices.of(model)
    features = gathered(outputs)
    return features if slices is None else slices.gathered(features)
