"""Operations with rules, as functions of samples and of values that all ranks have."""

import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf


@dataclass
class Case:
    """A function of samples and of values that all ranks have."""

    function: Any
    rows: tuple[tuple[int, ...], ...] = ((4,),)
    """Shapes of samples of each argument with rows."""
    shared: tuple[tuple[int, ...], ...] = ()
    """Shapes of further arguments that all ranks have."""
    positive: bool = False
    integers: int = 0
    """Bound on the values of all arguments, which are integers then."""
    gathers: bool = False
    """Whether rows have to be gathered for it."""
    order: int = 2
    """How often it can be differentiated."""
    line: int = field(default_factory=lambda: sys._getframe(2).f_lineno)


def elementwise(*functions: Any, **options: Any) -> list[Case]:
    return [Case(function, **options) for function in functions]


def checked(x: Any, assertion: Any) -> Any:
    """Return twice a tensor, once it is checked."""
    with tf.control_dependencies([] if assertion is None else [assertion]):
        return 2.0 * x


raw, math, nn = tf.raw_ops, tf.math, tf.nn
CASES: list[Case] = [
    *elementwise(
        tf.abs, math.sin, math.cos, math.tan, math.asinh, math.atan, math.sinh, math.cosh, math.erf, math.erfc
    ),
    *elementwise(tf.exp, math.expm1, tf.square, tf.tanh, tf.sigmoid, nn.relu, nn.relu6, nn.elu, nn.selu, nn.softplus),
    Case(nn.softsign, order=1),
    *elementwise(nn.leaky_relu, nn.gelu, nn.silu, tf.negative, math.softplus, tf.identity, tf.stop_gradient),
    *elementwise(tf.sqrt, math.log, math.log1p, math.rsqrt, math.reciprocal, math.lgamma, math.digamma, positive=True),
    *elementwise(lambda x: math.acosh(1.5 + x), lambda x: x**2.5, lambda x: x % 0.7, positive=True),
    *elementwise(math.bessel_i0, math.bessel_i0e, math.bessel_i1, math.bessel_i1e, math.ndtri, positive=True, order=0),
    *elementwise(tf.sign, tf.floor, math.ceil, tf.round, math.rint, order=0),
    *elementwise(lambda x: tf.cast(x > 0, x.dtype), lambda x: tf.cast(math.is_finite(x), x.dtype), order=0),
    *elementwise(lambda x: tf.cast(tf.bitcast(x, tf.int64) < 0, x.dtype), order=0),
    *elementwise(lambda x: tf.cast(math.is_nan(x) | math.is_inf(x), x.dtype), order=0),
    *elementwise(lambda x: tf.cast(~((x >= 0) & (x < 1)), x.dtype), lambda x: tf.cast(x <= 1, tf.int64), order=0),
    *elementwise(
        lambda x: math.asin(0.3 * tf.tanh(x)), lambda x: math.acos(0.3 * tf.tanh(x)), lambda x: math.atanh(x / 9)
    ),
    Case(math.erfinv, positive=True, order=1),
    Case(lambda x: tf.clip_by_value(x, -0.5, 0.5)),
    Case(
        lambda x: raw.ClipByValue(
            t=x, clip_value_min=tf.constant(-0.5, x.dtype), clip_value_max=tf.constant(0.5, x.dtype)
        ),
        order=1,
    ),
    Case(lambda x: tf.debugging.check_numerics(x, "of a test") * 2.0),
    Case(lambda x: raw.Snapshot(input=x), order=0),
    Case(lambda x: raw.PreventGradient(input=x), order=0),
    Case(lambda x: tf.identity_n([x, 2.0 * x])[1]),
    Case(lambda x: tf.zeros_like(x) + tf.ones_like(x) * x),
    Case(lambda x: tf.cast(tf.cast(x, tf.complex128) * 1j, tf.complex128).__abs__(), order=1),
    Case(lambda x: math.real(tf.complex(x, 2 * x) * tf.complex(x, x)) + math.imag(tf.complex(x, x) ** 2), order=1),
    Case(lambda x: math.angle(math.conj(tf.complex(x, x + 1))), order=1),
    # Of two
    *[
        Case(function, rows=((4,), (4,)))
        for function in (
            *(tf.add, tf.subtract, tf.multiply, tf.divide, math.divide_no_nan, tf.maximum, tf.minimum, math.atan2),
            *(math.squared_difference, math.xdivy, math.multiply_no_nan, lambda x, y: tf.add_n([x, y, x * y])),
            lambda x, y: tf.where(x > y, x, y * y),
            lambda x, y: raw.Select(condition=x > y, x=x, y=y * x),
            lambda x, y: tf.where(tf.not_equal(x, y) | tf.equal(x, y), x * y, y),
        )
    ],
    Case(math.xlogy, rows=((4,), (4,)), positive=True),
    Case(math.xlog1py, rows=((4,), (4,)), positive=True),
    Case(lambda x: math.polygamma(tf.ones_like(x), x), positive=True, order=1),
    Case(math.igamma, rows=((4,), (4,)), positive=True, order=0),
    Case(math.igammac, rows=((4,), (4,)), positive=True, order=0),
    Case(lambda x: math.zeta(1 + x, x), positive=True, order=0),
    Case(lambda x: math.betainc(x, x + 1, 0.5 * tf.ones_like(x)), positive=True, order=0),
    Case(lambda x, y: tf.cast(tf.less_equal(x, y) ^ tf.greater_equal(x, y), x.dtype), rows=((4,), (4,)), order=0),
    Case(lambda x, y: tf.cast(tf.logical_or(x > 0, y < 0), x.dtype), rows=((4,), (4,)), order=0),
    Case(lambda x, y: tf.cast(math.nextafter(x, y), x.dtype), rows=((4,), (4,)), order=0),
    Case(lambda x, y: tf.cast(raw.ApproximateEqual(x=x, y=y, tolerance=0.3), x.dtype), rows=((4,), (4,)), order=0),
    *[
        Case(function, rows=((4,), (4,)), integers=5, order=0)
        for function in (
            *(tf.bitwise.bitwise_and, tf.bitwise.bitwise_or, tf.bitwise.bitwise_xor, tf.bitwise.left_shift),
            *(tf.bitwise.right_shift, lambda x, y: x // (y + 1), lambda x, y: x % (y + 1)),
            lambda x, y: tf.truncatediv(x, y + 1) + tf.truncatemod(x, y + 1) + tf.bitwise.invert(x),
            lambda x, y: tf.cast(raw.PopulationCount(x=x), tf.int64) + y,
        )
    ],
    # With what all ranks have, broadcast, and with columns
    Case(lambda x, w: x * w + w, shared=((4,),)),
    Case(lambda x, w: x / w, shared=((1, 4),), positive=True),
    Case(lambda x, w: x[:, None, :] * w, shared=((3, 4),)),
    Case(lambda x: x / tf.reduce_sum(x, 1, keepdims=True), positive=True),
    Case(lambda x, b: nn.bias_add(x, b), rows=((3, 4),), shared=((4,),)),
    # Rows against rows
    Case(lambda x: x[:, None, :] - x[None, :, :], gathers=True),
    Case(lambda x: tf.matmul(x, x, transpose_b=True), gathers=True),
    Case(lambda x: tf.matmul(x, tf.transpose(x)), gathers=True),
    Case(
        lambda x: tf.linalg.set_diag(tf.matmul(x, x, transpose_b=True), tf.zeros(tf.shape(x)[0], x.dtype)), gathers=True
    ),
    # Reductions
    *[
        Case(partial(function, axis=axis, keepdims=keeps))
        for function in (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min)
        for axis, keeps in ((0, False), (0, True), (1, False), (-1, True), (None, False), ([0, 1], True))
    ],
    Case(lambda x: tf.reduce_prod(x, 1)),
    Case(lambda x: tf.reduce_prod(x, 0), order=0),
    Case(lambda x: tf.cast(tf.reduce_any(x > 0, 0), x.dtype), order=0),
    Case(lambda x: tf.cast(tf.reduce_all(x > 0, 1), x.dtype) * tf.cast(tf.reduce_all(x > 0, 0)[0], x.dtype), order=0),
    Case(lambda x: raw.EuclideanNorm(input=x, axis=[1]), order=1),
    Case(tf.reduce_logsumexp),
    Case(partial(tf.reduce_logsumexp, axis=1)),
    Case(math.reduce_std),
    Case(lambda x: nn.l2_loss(x), order=2),
    Case(lambda x: (x - tf.reduce_mean(x, 0)) / tf.sqrt(math.reduce_variance(x, 0) + 1e-3)),
    # Parts: sums of sums, scaled, divided, stacked
    Case(lambda x, w: 3.0 * tf.reduce_sum(x) / 5.0 + tf.reduce_sum(w * w) - tf.reduce_mean(x), shared=((4,),)),
    Case(lambda x: tf.reduce_sum(x * x) / tf.reduce_sum(tf.exp(x))),
    Case(lambda x: tf.stack([tf.reduce_sum(x), tf.reduce_mean(x), tf.constant(2.0, x.dtype)])),
    Case(lambda x: tf.concat([tf.reduce_sum(x, 0), tf.reduce_mean(x, 0)], 0)[1:3]),
    Case(lambda x: tf.where(tf.reduce_sum(x) > 0, tf.reduce_sum(x), 2.0 * tf.reduce_mean(x))),
    Case(
        lambda x: tf.matmul(tf.reduce_sum(x, 0, keepdims=True), tf.reduce_mean(x, 0, keepdims=True), transpose_b=True)
    ),
    Case(lambda x: tf.squeeze(tf.transpose(tf.tile(tf.reduce_sum(x, 0)[None, :, None], [2, 1, 1])), 0)),
    Case(lambda x: tf.unstack(tf.reduce_sum(x, 0))[2] + tf.split(tf.reduce_sum(x, 0), 2)[1][0]),
    Case(lambda x: tf.broadcast_to(tf.reduce_sum(x, 0), [3, 4]) + tf.pad(tf.reduce_sum(x, 0), [[0, 0]])),
    Case(lambda x: tf.norm(x)),
    Case(lambda x: tf.cast(tf.cast(tf.reduce_sum(x), tf.float32), tf.float64), order=1),
    # Products
    Case(lambda x, w: tf.matmul(x, w), shared=((4, 3),)),
    Case(lambda x, w: tf.matmul(w, x, transpose_b=True), shared=((3, 4),)),
    Case(lambda x, y: tf.matmul(x, y, transpose_a=True), rows=((4,), (3,))),
    Case(lambda x, w: tf.matmul(x, w), rows=((3, 4),), shared=((4, 2),)),
    Case(lambda x, y: tf.matmul(x, y, transpose_b=True), rows=((3, 4), (2, 4))),
    Case(lambda x, y: raw.BatchMatMul(x=x, y=y), rows=((3, 4), (4, 2)), order=1),
    Case(lambda x, w: tf.einsum("btd,dhk->bthk", x, w), rows=((3, 4),), shared=((4, 2, 2),)),
    Case(lambda x, y: tf.einsum("bqd,bkd->bqk", x, y), rows=((3, 4), (2, 4))),
    Case(lambda x, y: tf.einsum("...d,...d->...", x, y), rows=((3, 4), (3, 4)), gathers=True),
    Case(lambda x, y: tf.einsum("bi,bj->ij", x, y), rows=((4,), (3,))),
    Case(lambda x: tf.einsum("bi,ci->bc", x, x), gathers=True),
    Case(lambda x, w: tf.tensordot(x, w, 1), rows=((3, 4),), shared=((4, 2),)),
    # By sample
    Case(lambda x: nn.top_k(x, 2)[0]),
    Case(lambda x: x * tf.cast(nn.top_k(x, 2)[1], x.dtype)[:, :1]),
    Case(
        lambda x: tf.cast(tf.bitcast(x, tf.int64) < 0, x.dtype) + tf.cast(tf.bitcast(x, tf.uint8)[..., 1], x.dtype),
        order=0,
    ),
    Case(lambda x: tf.cast(raw.Bucketize(input=x, boundaries=[-0.5, 0.5]), x.dtype) * x),
    Case(lambda x: tf.ensure_shape(x, [None, 4]) * 2.0),
    *elementwise(nn.softmax, nn.log_softmax, lambda x: tf.cumsum(x, 1)),
    Case(lambda x: tf.cast(raw.NthElement(input=x, n=1), x.dtype), order=0),
    *[
        Case(function, rows=((3, 3),), order=order)
        for function, order in (
            (lambda x: tf.linalg.cholesky(tf.matmul(x, x, transpose_b=True) + tf.eye(3, dtype=x.dtype)), 1),
            (lambda x: tf.linalg.inv(x + 5 * tf.eye(3, dtype=x.dtype)), 2),
            (tf.linalg.det, 1),
            (lambda x: tf.linalg.slogdet(x)[1], 1),
            (lambda x: tf.linalg.band_part(x, 0, -1), 1),
            (tf.linalg.diag_part, 1),
            (lambda x: tf.linalg.svd(x, compute_uv=False), 0),
            (lambda x: tf.linalg.qr(x)[1], 0),
            (lambda x: tf.sort(math.real(tf.linalg.eigvals(x)), -1), 0),
            (lambda x: tf.linalg.eigvalsh(x + tf.linalg.matrix_transpose(x)), 0),
            (lambda x: tf.linalg.solve(x + 5 * tf.eye(3, dtype=x.dtype), x), 1),
            (lambda x: tf.linalg.triangular_solve(x + 5 * tf.eye(3, dtype=x.dtype), x), 1),
        )
    ],
    Case(lambda x: tf.abs(tf.signal.rfft(x)), order=0),
    Case(lambda x: tf.signal.irfft(tf.signal.rfft(x)), order=0),
    Case(lambda x: tf.abs(tf.signal.ifft(tf.signal.fft(tf.cast(x, tf.complex128)))), order=0),
    Case(lambda x: tf.signal.irfft2d(tf.signal.rfft2d(x)), rows=((4, 4),), order=0),
    Case(lambda x: tf.abs(tf.signal.ifft2d(tf.signal.fft2d(tf.cast(x, tf.complex128)))), rows=((4, 4),), order=0),
    Case(lambda x, y: tf.linalg.cross(x, y), rows=((3,), (3,))),
    Case(lambda x: tf.image.hsv_to_rgb(tf.image.rgb_to_hsv(x)), rows=((2, 2, 3),), positive=True, order=0),
    Case(lambda x: tf.image.adjust_contrast(x, 0.5), rows=((2, 2, 3),), order=0),
    Case(lambda x: nn.softmax_cross_entropy_with_logits(nn.softmax(2 * x), x)),
    Case(lambda x: nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(x, 1), x)),
    Case(lambda x: nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(x)[0]) % 4, x)),
    Case(lambda x: tf.cast(math.in_top_k(tf.argmin(x, 1), tf.cast(x, tf.float32), 2), x.dtype), order=0),
    Case(lambda x: tf.cast(tf.argmax(x, -1) + tf.argmin(x, 1), x.dtype), order=0),
    # Images
    *[
        Case(function, rows=((6, 6, 2),), shared=shapes, order=order)
        for function, shapes, order in (
            (lambda x, w: nn.conv2d(x, w, 2, "SAME"), ((3, 3, 2, 3),), 2),
            (lambda x, w: nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "VALID"), ((3, 3, 2, 1),), 2),
            (lambda x, w: nn.conv2d_transpose(x, w, tf.stack([tf.shape(x)[0], 12, 12, 3]), 2), ((3, 3, 3, 2),), 1),
            (lambda x, w: nn.dilation2d(x, w, [1, 1, 1, 1], "SAME", "NHWC", [1, 1, 1, 1]), ((3, 3, 2),), 1),
            (lambda x: nn.max_pool2d(x, 2, 2, "SAME"), (), 2),
            (lambda x: nn.avg_pool2d(x, 2, 2, "VALID"), (), 2),
            (lambda x: tf.image.resize(x, (3, 3)), (), 1),
            (lambda x: tf.image.resize(x, (9, 9), "nearest"), (), 1),
            (lambda x: tf.image.resize(x, (9, 9), "bicubic"), (), 1),
            (lambda x: tf.image.resize(x, (3, 3), "area"), (), 0),
            (lambda x: tf.image.resize(x, (3, 3), "lanczos3", antialias=True), (), 0),
            (lambda x: nn.space_to_depth(x, 2), (), 1),
            (lambda x: nn.depth_to_space(tf.concat([x, x], -1), 2), (), 1),
            (lambda x: tf.image.extract_patches(x, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID"), (), 0),
            (lambda x: tf.pad(x, [[0, 0], [1, 2], [0, 1], [0, 0]]), (), 2),
            (lambda x: tf.pad(x, [[0, 0], [1, 1], [0, 1], [0, 0]], "REFLECT"), (), 2),
            (lambda x: tf.pad(x, [[0, 0], [1, 1], [0, 1], [0, 0]], constant_values=2.0), (), 1),
            (lambda x: tf.image.flip_left_right(x), (), 1),
            (lambda x: tf.roll(x, [1, 2], [1, 2]), (), 1),
        )
    ],
    *[  # of whole tensors, with gradients of rows
        Case(function, rows=((6, 6, 2),), shared=shapes, gathers=True, order=1)
        for function, shapes in (
            (lambda x, w: nn.conv2d(tf.cumsum(x, 0), w, 1, "SAME") * x, ((3, 3, 2, 2),)),
            (lambda x: nn.avg_pool2d(tf.cumsum(x, 0), 2, 2, "VALID") * x[:, :3, :3], ()),
        )
    ],
    Case(
        lambda x: raw.ImageProjectiveTransformV3(
            images=x,
            transforms=tf.ones([tf.shape(x)[0], 8]) * tf.constant([1.0, 0.2, 0.1, 0.0, 1.0, 0.3, 0.0, 0.0]),
            output_shape=[6, 6],
            fill_value=0.0,
            interpolation="BILINEAR",
        ),
        rows=((6, 6, 2),),
        order=0,
    ),
    Case(
        lambda x: tf.cast(nn.local_response_normalization(tf.cast(x, tf.float32)), x.dtype), rows=((4, 4, 6),), order=1
    ),
    Case(lambda x, w: nn.conv3d(x, w, [1] * 5, "SAME"), rows=((4, 4, 4, 2),), shared=((2, 2, 2, 2, 3),), order=1),
    Case(
        lambda x: tf.cast(nn.max_pool3d(tf.cast(x, tf.float32), 2, 2, "SAME"), x.dtype), rows=((4, 4, 4, 2),), order=1
    ),
    Case(
        lambda x: tf.cast(nn.avg_pool3d(tf.cast(x, tf.float32), 2, 2, "SAME"), x.dtype), rows=((4, 4, 4, 2),), order=1
    ),
    # Shapes, and moving dims
    Case(lambda x: tf.cast(tf.shape(x), x.dtype), order=0),
    Case(lambda x: tf.cast(tf.stack(tf.shape_n([x, x])), x.dtype), order=0),
    Case(lambda x: x / tf.cast(tf.size(x), x.dtype)),
    *[
        Case(function, rows=((3, 4),))
        for function in (
            lambda x: tf.reshape(x, [-1, 4]),
            lambda x: tf.reshape(x, [-1, 12]),
            lambda x: tf.reshape(x, [tf.shape(x)[0], -1]),
            lambda x: tf.reshape(x, [-1, 3, 2, 2]),
            lambda x: tf.reshape(x, [tf.shape(x)[0] * 3, 4]),
            lambda x: tf.reshape(tf.reshape(x, [-1]), tf.shape(x)),
            lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [3, -1]),
            lambda x: tf.transpose(x, [2, 1, 0]),
            lambda x: x[:, 1:],
            lambda x: x[:, 0, ::2],
            lambda x: x[..., tf.newaxis, :2],
            lambda x: tf.slice(x, [0, 1, 0], [-1, 2, 3]),
            lambda x: tf.squeeze(x[:, :1], 1),
            lambda x: tf.expand_dims(tf.expand_dims(x, 0), -1),
            lambda x: tf.stack([x, 2.0 * x], 1),
            lambda x: tf.stack(tf.unstack(x, axis=1), 0),
            lambda x: tf.concat([x, x * x], 2),
            lambda x: tf.add_n(tf.split(x, 2, 2)),
            lambda x: tf.split(x, [1, 3], 2)[1],
            lambda x: tf.tile(x, [1, 2, 1]),
            lambda x: tf.repeat(x, 2, 1),
            lambda x: tf.reverse(x, [1]),
            lambda x: math.cumprod(x, 2),
            lambda x: math.cumulative_logsumexp(x, 2),
            lambda x: tf.reduce_sum(tf.reshape(x, [-1, 4]), 0),
        )
    ],
    Case(lambda x: tf.gather(x, [2, 0, 2], axis=1), rows=((3, 4),)),
    Case(lambda x: tf.gather(x, [2, 0, 2], axis=0), gathers=True, order=1),
    Case(lambda x: tf.gather(x, tf.argmax(x[:, :, 0], 1), axis=1, batch_dims=1), rows=((3, 4),)),
    Case(lambda x: tf.transpose(tf.gather(tf.transpose(x), [0, 1])) * 2.0),
    # Batches behind one another
    Case(lambda x, y: tf.concat([x, y], 0), rows=((4,), (4,))),
    Case(lambda x, y: tf.concat([x, y], 0)[: tf.shape(x)[0]] * y, rows=((4,), (4,))),
    Case(lambda x, y: tf.concat([x, y], 0)[tf.shape(x)[0] :] * x, rows=((4,), (4,))),
    Case(lambda x, y: tf.add_n(tf.split(tf.concat([x, y], 0), 2)), rows=((4,), (4,))),
    Case(
        lambda x, y: (
            tf.concat([tf.zeros([tf.shape(x)[0], 1], x.dtype), tf.ones([tf.shape(x)[0], 1], x.dtype)], 0)
            * tf.concat([x, y], 0)
        ),
        rows=((4,), (4,)),
    ),
    Case(lambda x: tf.tile(x, [2, 1])),
    Case(lambda x: tf.repeat(x, 3, 0)),
    Case(lambda x: tf.tile(tf.reduce_sum(x, 0, keepdims=True), [tf.shape(x)[0], 1])),
    Case(lambda x: tf.broadcast_to(tf.reduce_sum(x, 0), tf.shape(x)) * x),
    Case(lambda x: tf.fill([tf.shape(x)[0]], 2.0)[:, None] * tf.cast(x, tf.float32), order=0),
    Case(lambda x: tf.sort(x, axis=0), gathers=True, order=1),
    Case(lambda x: x[0] + x[-1], gathers=True),
    Case(lambda x: tf.reverse(x, [0]), gathers=True),
    Case(lambda x: tf.boolean_mask(x, x[:, 0] > 0), gathers=True, order=1),
    Case(lambda x: tf.gather(x, tf.argsort(x[:, 0])), gathers=True, order=1),
    # Lookups and segments
    Case(lambda x, w: tf.gather(w * 1.0, tf.argmax(x, 1)), shared=((4, 3),), order=1),
    Case(lambda x, w: tf.gather_nd(w, tf.stack([tf.argmax(x, 1), tf.argmin(x, 1)], 1)), shared=((4, 4),)),
    Case(lambda x: tf.one_hot(tf.argmax(x, 1), 4, dtype=x.dtype) * x),
    Case(lambda x: math.unsorted_segment_sum(x, tf.argmax(x, 1), 4)),
    Case(lambda x: math.unsorted_segment_max(x, tf.argmax(x, 1), 4), order=0),
    Case(lambda x: math.unsorted_segment_min(x, tf.argmax(x, 1), 4), order=0),
    Case(lambda x: math.unsorted_segment_prod(x, tf.argmax(x, 1), 4), order=0),
    Case(lambda x: tf.scatter_nd(tf.argmax(x, 1)[:, None], x, [4, 4])),
    Case(lambda x: math.confusion_matrix(tf.argmax(x, 1), tf.argmin(x, 1), 4), order=0),
    # Loops and branches: of whole tensors
    Case(lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2.0, lambda: x * x), gathers=True, order=1),
    Case(lambda x: tf.map_fn(lambda row: row * tf.reduce_sum(row), x), gathers=True, order=1),
    Case(
        lambda x: tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s * 1.5), (0, tf.reduce_sum(x, 0)))[1], order=1
    ),
    *[
        Case(function, gathers=True, order=1)
        for function in (
            lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_sum(x), lambda: 2.0 * tf.reduce_sum(x * x)),
            lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x / tf.reduce_sum(x, 0), lambda: x * tf.reduce_mean(x, 0)),
            lambda x: tf.cond(tf.shape(x)[0] > 3, lambda: tf.reshape(x, [tf.shape(x)[0], 2, 2])[0], lambda: x[:2, :2]),
            lambda x: tf.cond(
                tf.size(x) > 3,
                lambda: tf.tensordot(x, tf.ones((4, 4), x.dtype), 1),
                lambda: tf.tile(tf.ones((1, 4), x.dtype), [tf.shape(x)[0], 1]) * x,
            ),
            lambda x: tf.while_loop(
                lambda i, s: i < 3, lambda i, s: (i + 1, s + tf.reduce_max(x, 0) * tf.reduce_mean(s)), (0, x)
            )[1],
            lambda x: tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + tf.reduce_sum(x)), (0, 1.0 * x))[1],
            lambda x: tf.map_fn(lambda row: tf.reduce_sum(row * x), x),
        )
    ],
    # Assertions of rows
    *[
        Case(function, order=1)
        for function in (
            lambda x: checked(x, tf.debugging.assert_less(x, tf.constant(99.0, x.dtype))),
            lambda x: checked(x, tf.debugging.assert_all_finite(x, "of a test")),
            lambda x: checked(x, tf.debugging.assert_near(x, x + 1e-20)),
            lambda x: checked(x, tf.debugging.assert_positive(tf.reduce_sum(x * x))),
            lambda x: checked(x, tf.debugging.Assert(tf.reduce_any(x[:, 0] > tf.reduce_max(x[:, 0]) - 1e-9), [x])),
        )
    ],
    # Random numbers
    Case(lambda x: x * tf.random.stateless_normal(tf.shape(x), [1, 2], dtype=tf.float64)),
    Case(lambda x: x * tf.cast(tf.random.stateless_normal(tf.shape(x), [1, 2]), x.dtype)),
    Case(lambda x: x * tf.random.stateless_uniform(tf.shape(x), [1, 2], dtype=tf.float64), rows=((3,),)),
    Case(
        lambda x: x * tf.cast(tf.random.stateless_uniform(tf.shape(x), [3, 2], 0, 9, tf.int32), x.dtype), rows=((3,),)
    ),
    Case(
        lambda x: tf.cast(tf.random.stateless_uniform(tf.shape(x), [3, 2], None, None, tf.int64) // 3, x.dtype) + x,
        order=0,
    ),
    Case(lambda x: x * tf.random.stateless_truncated_normal(tf.shape(x), [1, 2], dtype=tf.float64)),
    Case(lambda x: x * tf.random.stateless_gamma(tf.shape(x), [1, 2], 2.0, dtype=tf.float64)),
    Case(
        lambda x, a: x * tf.random.stateless_gamma(tf.shape(x), [1, 2], a**2, dtype=tf.float64),
        shared=((4,),),
        order=1,
    ),
    Case(lambda x: x * tf.cast(tf.random.stateless_binomial(tf.shape(x), [1, 2], 5.0, 0.3), x.dtype)),
    Case(lambda x: tf.broadcast_to(x, tf.broadcast_dynamic_shape(tf.shape(x), tf.shape(x[:, :1]))) * 2.0),
    Case(lambda x: tf.reshape(x, tf.pad(tf.shape(x), [[0, 1]], constant_values=1))),
    Case(
        lambda x, y: tf.broadcast_to(x[:, :1], [tf.maximum(tf.shape(x)[0], tf.shape(y)[0]), 4]) * y, rows=((4,), (4,))
    ),
    Case(lambda x: x * tf.random.stateless_uniform([tf.shape(x)[0], 1], [1, 2], dtype=tf.float64)),
    Case(lambda x: nn.experimental.stateless_dropout(x, 0.4, [1, 2])),
]


def values_for(case: Case, samples: int) -> list[np.ndarray]:
    rng = np.random.default_rng(samples)
    found = []
    for shape in [*((samples, *rows) for rows in case.rows), *case.shared]:
        if case.integers:
            found.append(rng.integers(0, case.integers, shape))
        else:
            values = rng.standard_normal(shape)
            found.append(np.abs(values) + 0.1 if case.positive else values)
    return found


def computed(case: Case, *tensors: Any) -> list[Any]:
    """Return the values of a case, and their derivatives along fixed directions."""
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(tensors)
        with tf.GradientTape() as inner:
            inner.watch(tensors)
            values = [each for each in tf.nest.flatten(case.function(*tensors)) if tf.is_tensor(each)]
            curved = [_squares(each) for each in values if case.order and (each.dtype.is_floating or _complex(each))]
            total = tf.add_n(curved) if curved else None
        found = inner.gradient(total, tensors) if curved else []
        slopes = [None if each is None else tf.convert_to_tensor(each) for each in found]
        bent = [tf.reduce_sum(each**2) for each in slopes if each is not None] if case.order > 1 else []
    curvatures = outer.gradient(tf.add_n(bent), tensors) if bent else []
    return [*values, *(each for each in (*slopes, *curvatures) if each is not None)]


def _complex(tensor: Any) -> bool:
    return bool(tensor.dtype.is_complex)


def _squares(tensor: Any) -> Any:
    parts = [math.real(tensor), math.imag(tensor)] if _complex(tensor) else [tensor]
    return tf.add_n([tf.reduce_sum(tf.cast(each, tf.float64) ** 2) for each in parts])
