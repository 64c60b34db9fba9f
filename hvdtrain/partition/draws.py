"""Random numbers for the whole batch, of which each rank draws its rows: the same bits as in one process.

TensorFlow's stateless generators count (Philox: Salmon et al. 2011): element i of a tensor comes from counter i // k,
of which each gives k elements. A rank draws from the counter at which its rows begin.
"""

from collections.abc import Mapping

import tensorflow as tf

from hvdtrain.compat.tensorflow import record_gradient_of
from hvdtrain.partition.kinds import Count, Rows
from hvdtrain.partition.rules import Call, Finished, Made, Outputs, whole
from hvdtrain.partition.sizes import values_of

_ELEMENTS: Mapping[str, Mapping[tf.DType, int]] = {
    "StatelessRandomUniformV2": {tf.float16: 4, tf.bfloat16: 4, tf.float32: 4, tf.float64: 2},
    "StatelessRandomNormalV2": {tf.float16: 4, tf.bfloat16: 4, tf.float32: 4, tf.float64: 2},
    "StatelessRandomUniformIntV2": {tf.int32: 4, tf.uint32: 4, tf.int64: 2, tf.uint64: 2},
    "StatelessRandomUniformFullIntV2": {tf.int32: 4, tf.uint32: 4, tf.int64: 2, tf.uint64: 2},
}
"""Elements that a counter gives. Others, such as truncated normals, take a number of counters that depends on them."""


def draw(call: Call) -> "Made | Outputs | Finished":
    """Draw this rank's rows where a shape counts those of the batch, else everything on every rank."""
    p = call.partition
    wanted = values_of(p, call.inputs[0])
    entry = wanted.entries[0] if wanted is not None and wanted.counts == [0] else None
    if wanted is None or not isinstance(entry, Count) or len(entry.per) != 1:
        return whole(call)
    dtype = tf.as_dtype(call.attrs["dtype"].type)
    each, like = _ELEMENTS.get(call.type, {}).get(dtype), Rows(0, entry.per)
    if each is None:
        return Finished(whole(call)[0], lambda op: [p.rows(record_gradient_of(op).outputs[0], like)])
    with p.plain():
        shape, key, counter, alg, *bounds = call.inputs
        inner = tf.reduce_prod(tf.cast(shape[1:], tf.int64))
        first = tf.cast(p.begin, tf.int64) * tf.cast(entry.per[0], tf.int64) * inner
        rows = tf.cast(p.local_length(entry.per), tf.int64)
        begun = first % each
        low = counter[0] + tf.cast(first // each, tf.uint64)
        moved = tf.stack([low, *tf.unstack(counter[1:], num=counter.shape[0] - 1)])
        options = {"minval": bounds[0], "maxval": bounds[1]} if bounds else {"dtype": dtype}
        drawn = tf.expand_dims(begun + rows * inner, 0)
        flat = getattr(tf.raw_ops, call.type)(shape=drawn, key=key, counter=moved, alg=alg, **options)
        value = tf.reshape(flat[begun:], p.local_shape(shape))
        value.set_shape([None, *(size if isinstance(size, int) else None for size in wanted.entries[1:])])
    return Outputs([value], [like])
