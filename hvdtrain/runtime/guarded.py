"""Keep Horovod's ops unchanged within a compiled function.

Horovod's data ops carry no state, so TensorFlow takes two with equal inputs for one, and one with a constant input for
a constant: its first result is kept, and the op never runs again. Where the input is constant on one rank only, the
others wait for it for ever. Three things keep each op what it is:

- an attribute of its own, by which the graph optimizer (Grappler) does not merge it with another;
- an input that passes through PlaceholderWithDefault, which Grappler does not fold;
- an empty `_scoped_allocator`, for which the runtime's own constant folding, which every function goes through when it
  is first called, leaves an op alone (`IsConstantFoldable` in tensorflow/core/common_runtime/constant_folding.cc).
"""

import zlib
from typing import Any

import tensorflow as tf

from hvdtrain.compat.tensorflow import mark_stateful


def guarded(tensor: tf.Tensor) -> tf.Tensor:
    """Return `tensor` as an input that is not folded; eagerly, `tensor` itself."""
    if tf.executing_eagerly():
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)


def kept(output: Any, name: str | None = None) -> Any:
    """Mark the op behind `output` (a tensor, or a list of those of one op) so that it is neither merged nor folded.

    Args:
        output: what the op returned.
        name: what tells it from the others in its graph; its name there if None.
    """
    if not tf.executing_eagerly():
        op = (output[0] if isinstance(output, list | tuple) else output).op
        mark_stateful(op, zlib.crc32((name or op.name).encode()))
    return output
