"""Sums over the replicas of which only 16 bits per element travel.

The tensors are laid end to end and cut into one chunk for each of the R replicas. A chunk goes to its replica in 16
bits, is added up there in the tensors' own 32 or 64 bits, and the sum goes to all replicas in 16 bits. Both legs of the
usual ring carry half the bytes, an element is rounded twice however many replicas there are, nothing is ever added in
16 bits, and all replicas decode the same words: their results are bitwise equal. Where sums go by host, the ranks of a
host add up in their own 32 or 64 bits, and the hosts are the replicas.

Formats:
    bf16  float32's exponents and 8 significant bits. Values are sent as they are. A float64 beyond float32's range
          becomes infinite or zero.
    fp16  5 bits of exponent and 11 significant bits. Each chunk is multiplied by the power of two that brings its
          largest finite value into [2^14, 2^15), half of the format's range; the exponent is the message's first word.

Infinities and NaN arrive as such. With one replica nothing travels, so nothing is rounded either.

Error. Let u be the unit roundoff, the largest relative error of rounding to nearest: 2^-8 for bf16, 2^-11 for fp16
(2^-24 more for float64, which passes float32 on its way). fp16 rounds what is smaller than 2^-14 after scaling to
multiples of 2^-24, which is an error of at most t = 2^-39 of the chunk's largest value; for bf16 t = 0. For an element
let A be the sum of the replicas' |g_i|, M the sum over the replicas of the largest |g_i| in its chunk, and g the error
of the 32-bit arithmetic, (R + 1) v / (1 - (R + 1) v) with v = 2^-24, for R - 1 additions and two factors (Higham 2002,
section 3.1). Then

    first leg           e1 = u A + t M
    sum, second leg     |result - exact| <= e1 + ((1 + g)(1 + u) - 1)(A + e1) + t (1 + g)(1 + u + t) M

which is 2 u A + 2 t M to first order. What is smaller than the smallest normal number of its type (2^-126 in
float32) may be taken for zero, as by TensorFlow's own arithmetic, and what is within rounding of its largest may
become infinite.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.runtime.packing import pack, unpack

WireFormat = Literal["fp16", "bf16"]

_TOP_EXPONENT = 14
"""Of the largest value in a scaled chunk: rounded up it is 2^15, and a half ends at 65504."""


class _Layout(NamedTuple):
    """Position of the exponent in the bits of a float."""

    bits: tf.DType
    mantissa: int
    bias: int


def _layout(dtype: tf.DType) -> _Layout:
    return _Layout(tf.int32, 23, 127) if dtype == tf.float32 else _Layout(tf.int64, 52, 1023)


def is_compressible(dtype: tf.DType) -> bool:
    """Return whether tensors of `dtype` are sent in 16 bits: wider floats."""
    return dtype in (tf.float32, tf.float64)


def compressed_sum(
    tensors: Sequence[tf.Tensor],
    exchange: Collectives,
    wire: WireFormat,
    *,
    name: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> list[tf.Tensor]:
    """Return `postscale` times the sum over the replicas of `prescale` times each tensor.

    Args:
        tensors: at least one, all float32 or all float64, of any shapes; the same ones on every replica.
        exchange: the replicas.
        wire: the format in which they travel.
        name: tells this sum from every other; `/scatter` and `/gather` are added.
        prescale: multiplies before anything is rounded.
        postscale: multiplies the wide sum, before it is rounded again.
    """
    flat = pack(tensors) if exchange.by_host is not None else None
    if flat is None or exchange.by_host is None or not exchange.by_host.suits(flat):
        return _compressed(tensors, exchange=exchange, wire=wire, name=name, prescale=prescale, postscale=postscale)

    def between(mine: tf.Tensor, crossing: Collectives) -> tf.Tensor:
        return _compressed([mine], exchange=crossing, wire=wire, name=name, prescale=1.0, postscale=postscale)[0]

    return unpack(exchange.by_host.sum(_times(flat, prescale), between, name=name), tensors)


def compressed_sums(
    tensors: Sequence[tf.Tensor],
    exchange: Collectives,
    wire: WireFormat,
    *,
    name: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
    most: int,
) -> list[tf.Tensor]:
    """Return what `compressed_sum` does; a single tensor of more than `most` elements travels in slices."""
    elements = tensors[0].shape.num_elements()
    if len(tensors) > 1 or elements is None or elements <= most:
        return compressed_sum(tensors, exchange, wire, name=name, prescale=prescale, postscale=postscale)
    flat = tf.reshape(tensors[0], [-1])
    # Slices that begin at a multiple of 64 bytes are no copies.
    sums = [
        compressed_sum(
            [flat[begin : begin + most]],
            exchange,
            wire,
            name=f"{name}/slice{begin // most}",
            prescale=prescale,
            postscale=postscale,
        )[0]
        for begin in range(0, elements, most)
    ]
    return [tf.reshape(tf.concat(sums, 0), tensors[0].shape)]


def _compressed(
    tensors: Sequence[tf.Tensor],
    exchange: Collectives,
    wire: WireFormat,
    name: str,
    prescale: float,
    postscale: float,
) -> list[tf.Tensor]:
    dtype, size = tensors[0].dtype, exchange.size
    if wire == "bf16":  # which is known element by element: what is laid end to end has half the bytes
        words = _chunks(pack([encode(_times(tensor, prescale), wire) for tensor in tensors]), size)
    else:
        words = encode(_times(_chunks(pack(tensors), size), prescale), wire)
    scattered = exchange.all_to_all(words, name=f"{name}/scatter")
    total = tf.reduce_sum(decode(scattered, wire, dtype), 0, keepdims=True)
    # Gloo's all-gather of messages of 8 MB uses one direction of a link at a time; this one, both.
    copies = tf.concat([encode(_times(total, postscale), wire)] * size, 0)
    gathered = exchange.all_to_all(copies, name=f"{name}/gather")
    if wire == "bf16":
        return [decode(part, wire, dtype) for part in unpack(tf.reshape(gathered, [-1]), tensors)]
    return unpack(tf.reshape(decode(gathered, wire, dtype), [-1]), tensors)


def encode(chunks: tf.Tensor, wire: WireFormat) -> tf.Tensor:
    """Return `chunks` [k, w], float32 or float64, as words of 16 bits: [k, w] for bf16, [k, 1 + w] for fp16."""
    if wire == "bf16":
        return tf.bitcast(tf.cast(chunks, tf.bfloat16), tf.uint16)
    exponents = _exponents(chunks)
    head = tf.bitcast(tf.cast(exponents, tf.int16), tf.float16)
    halves = tf.cast(chunks * _power_of_two(-exponents, chunks.dtype), tf.float16)
    return tf.bitcast(tf.concat([head, halves], 1), tf.uint16)


def decode(words: tf.Tensor, wire: WireFormat, dtype: tf.DType) -> tf.Tensor:
    """Return the chunks [k, w] of `dtype` that `encode` made `words` of."""
    if wire == "bf16":
        return tf.cast(tf.bitcast(words, tf.bfloat16), dtype)
    halves = tf.bitcast(words, tf.float16)
    exponents = tf.cast(tf.bitcast(halves[:, :1], tf.int16), _layout(dtype).bits)
    return tf.cast(halves[:, 1:], dtype) * _power_of_two(exponents, dtype)


def _exponents(chunks: tf.Tensor) -> tf.Tensor:
    """Return for each chunk the exponent [k, 1] of the power of two that it is divided by.

    It is bounded so that the power and its inverse are normal numbers: all zeros need no case of their own.
    """
    layout = _layout(chunks.dtype)
    biased = tf.bitwise.right_shift(
        tf.bitcast(_largest(chunks), layout.bits), tf.constant(layout.mantissa, layout.bits)
    )
    return tf.maximum(biased - layout.bias - _TOP_EXPONENT, 1 - layout.bias)


def _largest(chunks: tf.Tensor) -> tf.Tensor:
    """Return the largest finite absolute value in each chunk: [k, 1]; infinities must not push the others to zero."""
    # Two reductions read memory only; abs() would write as much again.
    largest = tf.maximum(tf.reduce_max(chunks, 1, keepdims=True), -tf.reduce_min(chunks, 1, keepdims=True))
    return tf.cond(tf.reduce_all(tf.math.is_finite(largest)), lambda: largest, lambda: _largest_finite(chunks))


def _largest_finite(chunks: tf.Tensor) -> tf.Tensor:
    finite = tf.where(tf.math.is_finite(chunks), tf.abs(chunks), tf.zeros([], chunks.dtype))
    return tf.reduce_max(finite, 1, keepdims=True)


def _power_of_two(exponents: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return 2^exponents exactly, which tf.pow does not promise."""
    layout = _layout(dtype)
    bits = tf.bitwise.left_shift(exponents + layout.bias, tf.constant(layout.mantissa, layout.bits))
    return tf.bitcast(bits, dtype)


def _chunks(flat: tf.Tensor, count: int) -> tf.Tensor:
    """Cut a vector into `count` chunks of equal width, at least 1: [count, w]."""
    size = tf.size(flat)
    width = tf.maximum((size + count - 1) // count, 1)
    known = flat.shape.num_elements()
    if not known or known % count:  # a padding of nothing would be a copy of everything
        flat = tf.pad(flat, [[0, width * count - size]])
    return tf.reshape(flat, [count, width])


def _times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    return tensor if factor == 1.0 else tensor * factor
