"""Compiled functions of batches that are traced once, whatever the size of the last batch."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.data.batch import Batch


def compile_for(example: Batch, function: Callable[..., Any], *more: tf.TypeSpec) -> Callable[..., Any]:
    """Compile `function(batch, *tensors)` for batches like `example` with any number of samples.

    Args:
        example: gives structure, dtypes and shapes.
        function: what is compiled, without data-dependent Python control flow.
        more: the specs of the further arguments.
    """

    def on_leaves(leaves: list[Any], *rest: Any) -> Any:
        return function(_rebuild(example, leaves), *rest)

    leaves = [_any_number_of_samples(leaf) for leaf in _leaves(example)]
    compiled = tf.function(on_leaves, input_signature=(leaves, *more), autograph=False)
    return lambda batch, *rest: compiled(_leaves(batch), *rest)


def _leaves(batch: Batch) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]


def _rebuild(example: Batch, leaves: list[Any]) -> Batch:
    """Put `leaves` in the places of the tensors of `example`; None stays None."""
    rest = iter(leaves)
    return tf.nest.map_structure(lambda leaf: None if leaf is None else next(rest), example)


def _any_number_of_samples(leaf: Any) -> tf.TypeSpec:
    spec = tf.type_spec_from_value(leaf)
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec
