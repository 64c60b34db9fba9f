"""Each public function of `keras.ops` and `keras.random`, as a step of a user's own calls it with rows of the batch."""

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras
import numpy as np

from tests.distributed.partition_cases import Case

ops, random = keras.ops, keras.random


def public_functions() -> dict[str, Any]:
    """Return what is public, by names such as `ops.sum`, `ops.image.resize` and `random.normal`."""
    found: dict[str, Any] = {}
    for module in (ops, random):
        room = module.__name__.rpartition(".")[2]
        known = set()
        for name, value in vars(module).items():
            if callable(value) and not name.startswith("_") and not isinstance(value, type | types.ModuleType):
                found[f"{room}.{name}"] = value
                known.add(value)
        for inner, submodule in vars(module).items():
            if isinstance(submodule, types.ModuleType) and submodule.__name__.startswith("keras.") and inner[0] != "_":
                for name, value in vars(submodule).items():
                    if callable(value) and not name.startswith("_") and value not in known:
                        found[f"{room}.{inner}.{name}"] = value
    return found


def function_of(name: str) -> Any:
    """Return a public function by its name."""
    found: Any = keras
    for part in name.split("."):
        found = getattr(found, part)
    return found


def of(names: str, call: Callable[..., Any] = lambda f, x: f(x), room: str = "ops", **options: Any) -> dict[str, Case]:
    """Return cases of functions that are called alike: `call(function, *arguments)`."""
    return {
        f"{room}.{name}": Case(partial(call, function_of(f"{room}.{name}")), **{"order": 1, **options})
        for name in names.split()
    }


def square(x: Any) -> Any:
    """Return matrices far from singular."""
    return x + 5.0 * ops.eye(x.shape[-1], dtype=x.dtype)


def definite(x: Any) -> Any:
    return ops.matmul(x, ops.swapaxes(x, -1, -2)) + ops.eye(x.shape[-1], dtype=x.dtype)


def whole_numbers(x: Any) -> Any:
    return ops.cast(ops.argmax(x, -1), "int32")


def signal(x: Any) -> tuple[Any, Any]:
    return x, 0.5 * x


def turned(x: Any) -> Any:
    """Return an affine transform for each image."""
    return ops.ones((ops.shape(x)[0], 1)) * np.array([[1, 0.1, 0.2, 0.1, 1, 0.3, 0, 0]])


def tripled(x: Any) -> Any:
    @ops.custom_gradient
    def function(value: Any) -> Any:
        return 3.0 * value, lambda *args, upstream=None: 3.0 * (args[0] if upstream is None else upstream)

    return function(x)


TWO: Mapping[str, Any] = {"rows": ((4,), (4,))}
IMAGE: Mapping[str, Any] = {"rows": ((6, 6, 3),)}
MATRIX: Mapping[str, Any] = {"rows": ((3, 3),)}
AXIS = "all any amax amin argmax argmin average logsumexp max mean median min nanargmax nanargmin nanmax nanmean "
AXIS += "nanmedian nanmin nanprod nanstd nansum nanvar norm prod ptp std sum var"

OPERATIONS: Mapping[str, Case] = {
    # Elementwise
    **of(
        "abs absolute angle arcsinh arctan array cbrt ceil celu conj conjugate convert_to_tensor copy cos cosh deg2rad "
        "elu erf erfc exp expm1 fabs floor gelu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh i0 imag "
        "isfinite isinf isnan isneginf isposinf isreal leaky_relu log_sigmoid logical_not nan_to_num negative "
        "ones_like rad2deg real relu relu6 round selu sigmoid sign signbit silu sin sinc sinh soft_shrink softplus "
        "softsign sparse_plus sparse_sigmoid square squareplus stop_gradient swish tan tanh tanh_shrink trunc "
        "zeros_like"
    ),
    **of("log log10 log1p log2 rsqrt sqrt reciprocal", positive=True),
    **of("arccos arcsin arctanh erfinv", lambda f, x: f(0.9 * ops.tanh(x))),
    **of("arccosh", lambda f, x: f(1.1 + x), positive=True),
    **of("exp2", lambda f, x: f(ops.cast(x, "float32"))),
    **of("view", lambda f, x: f(x, "int64"), order=0),
    **of("empty_like", lambda f, x: ops.shape(f(x))),
    **of("cast saturate_cast", lambda f, x: f(x, "float32")),
    **of("clip", lambda f, x: f(x, -0.5, 0.5)),
    **of("full_like", lambda f, x: f(x, 2.0)),
    **of("threshold", lambda f, x: f(x, 0.1, 0.0)),
    **of("bitwise_invert bitwise_not", integers=9, order=0),
    # Of two
    **of(
        "add arctan2 divide divide_no_nan equal floor_divide fmax fmin fmod greater greater_equal heaviside hypot "
        "isclose less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor maximum minimum mod multiply "
        "nextafter not_equal subtract true_divide polar",
        lambda f, x, y: f(x, y),
        **TWO,
    ),
    **of("power", lambda f, x, y: f(x, y), positive=True, **TWO),
    **of("ldexp", lambda f, x: f(x, whole_numbers(x)[:, None])),
    **of(
        "bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm left_shift right_shift",
        lambda f, x, y: f(x, y),
        integers=9,
        order=0,
        **TWO,
    ),
    **of("where", lambda f, x, y: f(x > y, x, y * y), **TWO),
    **of("select", lambda f, x, y: f([x > y, x < 0], [x, y], 1.0), **TWO),
    # Of each sample, along its own dims
    **of(AXIS, lambda f, x: f(x, axis=1)),
    **of("count_nonzero", lambda f, x: f(x, axis=1), order=0),
    **of("quantile nanquantile", lambda f, x: f(x, 0.3, axis=1)),
    **of("percentile nanpercentile", lambda f, x: f(x, 30.0, axis=1)),
    **of("moments", lambda f, x: f(x, axes=[1])),
    **of("softmax log_softmax sparsemax normalize sort argsort diff trapezoid glu", lambda f, x: f(x, axis=-1)),
    **of("argpartition", lambda f, x: f(x, 2, axis=1), order=0),
    **of("cumsum cumprod nancumprod nancumsum flip", lambda f, x: f(x, axis=1)),
    **of("roll", lambda f, x: f(x, 1, axis=1)),
    **of("fliplr"),
    **of("rot90", lambda f, x: f(x, axes=(1, 2)), **IMAGE),
    **of("top_k", lambda f, x: f(x, 2)),
    **of("take", lambda f, x: f(x, [0, 2], axis=1)),
    **of("take_along_axis", lambda f, x: f(x, ops.argsort(x, axis=1), axis=1)),
    **of("layer_normalization rms_normalization"),
    **of(
        "batch_normalization",
        lambda f, x, m, v: f(x, m, v**2 + 0.1, axis=-1, scale=m, offset=v),
        shared=((4,), (4,)),
    ),
    **of("isin", lambda f, x: f(whole_numbers(x), [1, 2]), order=0),
    **of("digitize", lambda f, x: f(x, np.array([-0.5, 0.0, 0.7])), order=0),
    **of("searchsorted", lambda f, x: f(ops.sort(x[:, 0] * 0 + ops.arange(1.0)), x[:, 0]), order=0, gathers=True),
    **of("one_hot multi_hot", lambda f, x: f(ops.argsort(x, axis=1), 4), order=0),
    **of("in_top_k", lambda f, x: f(whole_numbers(x), ops.cast(x, "float32"), 2), order=0),
    **of("cross", lambda f, x, y: f(x, y), rows=((3,), (3,))),
    **of("unravel_index", lambda f, x: f(whole_numbers(x), (2, 2)), order=0),
    # Products
    **of("matmul", lambda f, x, w: f(x, w), shared=((4, 3),)),
    **of("dot", lambda f, x, w: f(x, w), shared=((4, 3),)),
    **of("inner", lambda f, x, w: f(x, w), shared=((4,),), order=0),
    **of("tensordot", lambda f, x, w: f(x, w, axes=1), shared=((4, 3),)),
    **of("einsum", lambda f, x, y: f("bi,bj->bij", x, y), rows=((4,), (3,))),
    **of("outer", lambda f, x, w: f(x, w), shared=((3,),)),
    **of("kron", lambda f, x, w: f(x, w), shared=((1, 3),)),
    **of("vdot", lambda f, x, y: f(x, y), **TWO),
    **of("cdist", lambda f, x, w: f(x, w), shared=((3, 4),)),
    **of("correlate", lambda f, x: f(x[:, 0], ops.ones(1, x.dtype)), gathers=True),
    **of("corrcoef", lambda f, x: f(ops.transpose(x))),
    **of("dot_product_attention", lambda f, x, y: f(x, y, y), rows=((3, 2, 4), (3, 2, 4))),
    # Matrices of each sample
    **of("cholesky", lambda f, x: f(definite(x)), **MATRIX),
    **of("cholesky_inverse", lambda f, x: f(ops.cholesky(definite(x))), **MATRIX),
    **of("det inv slogdet logdet", lambda f, x: f(definite(x)), **MATRIX),
    **of("eigh", lambda f, x: f(definite(x))[0], **MATRIX),
    **of("eig", lambda f, x: ops.sort(ops.real(f(definite(x))[0]), axis=-1), order=0, **MATRIX),
    **of("lu_factor", lambda f, x: f(square(x)), **MATRIX),
    **of("matrix_rank", order=0, **MATRIX),
    **of("pinv", lambda f, x: f(square(x)), **MATRIX),
    **of("qr", lambda f, x: f(square(x)), **MATRIX),
    **of("svd", lambda f, x: f(square(x), compute_uv=False), **MATRIX),
    **of("solve", lambda f, x, y: f(square(x), y), rows=((3, 3), (3, 3))),
    **of("lstsq", lambda f, x, y: f(x, y), rows=((3,), (2,)), order=0),
    **of("solve_triangular", lambda f, x, y: f(square(x), y, lower=True), rows=((3, 3), (3, 3))),
    **of("tril triu", **MATRIX),
    **of("diagonal trace", lambda f, x: f(x, axis1=1, axis2=2), **MATRIX),
    # Shapes, and moving dims
    **of("broadcast_to", lambda f, x: f(x[:, None], (ops.shape(x)[0], 3, 4))),
    **of("expand_dims", lambda f, x: f(x, 1)),
    **of("squeeze", lambda f, x: f(x[:, None], 1)),
    **of("moveaxis swapaxes", lambda f, x: f(x, 0, 1)),
    **of("transpose ravel shape size"),
    **of("ndim", lambda f, x: f(x) * x),
    **of("reshape", lambda f, x: f(x, (-1, 2, 2))),
    **of("rearrange", lambda f, x: f(x, "b (h w) -> b h w", h=2)),
    **of("append", lambda f, x, y: f(x, y, axis=1), **TWO),
    **of("concatenate", lambda f, x, y: f([x, y], axis=1), **TWO),
    **of("stack", lambda f, x, y: f([x, y], axis=1), **TWO),
    **of("hstack dstack", lambda f, x, y: f([x, y]), **TWO),
    **of("vstack", lambda f, x, y: f([x, y]), **TWO),
    **of("split array_split", lambda f, x: f(x, 2, axis=1)),
    **of("hsplit", lambda f, x: f(x, 2)),
    **of("dsplit", lambda f, x: f(x[:, None], 2)),
    **of("unstack", lambda f, x: f(x, axis=1)),
    **of("repeat", lambda f, x: f(x, 2, axis=1)),
    **of("tile", lambda f, x: f(x, [1, 2])),
    **of("pad", lambda f, x: f(x, [[0, 0], [1, 2]])),
    **of("get_item", lambda f, x: f(x, (slice(None), 1))),
    **of("slice", lambda f, x: f(x, (0, 1), (ops.shape(x)[0], 2))),
    **of("slice_update", lambda f, x: f(x, (0, 1), x[:, :2]), order=0),
    **of("scatter_update", lambda f, x, w: f(w, whole_numbers(x)[:, None], x), shared=((4, 4),)),
    **of("scatter", lambda f, x: f(whole_numbers(x)[:, None], x, (4, 4))),
    **of("vander", lambda f, x: f(x[:, 0], 3)),
    **of("view_as_complex", lambda f, x: f(x[:, :2])),
    **of("view_as_real", lambda f, x: f(ops.cast(x, "complex128"))),
    # Images and signals
    **of("max_pool average_pool", lambda f, x: f(x, 2), **IMAGE),
    **of("adaptive_average_pool adaptive_max_pool", lambda f, x: f(x, 4), **IMAGE),
    **of("conv", lambda f, x, w: f(x, w), shared=((3, 3, 3, 2),), **IMAGE),
    **of("conv_transpose", lambda f, x, w: f(x, w), shared=((3, 3, 2, 3),), **IMAGE),
    **of("depthwise_conv", lambda f, x, w: f(x, w), shared=((3, 3, 3, 1),), **IMAGE),
    **of("separable_conv", lambda f, x, w, p: f(x, w, p), shared=((3, 3, 3, 1), (1, 1, 3, 2)), **IMAGE),
    **of("depth_to_space", lambda f, x: f(ops.concatenate([x, x, x, x], -1), 2), **IMAGE),
    **of("space_to_depth", lambda f, x: f(x, 2), **IMAGE),
    **of("fold", lambda f, x: f(x, 3, 2), rows=((4, 4),)),
    **of("unfold", lambda f, x: f(x, 2), rows=((2, 3, 3),)),
    **of("psnr", lambda f, x, y: f(x, y, 1.0), **TWO),
    **of("fft fft2", lambda f, x: f(signal(x)), **MATRIX),
    **of("ifft2", lambda f, x: f(signal(x)), **MATRIX),
    **of("rfft"),
    **of("irfft", lambda f, x: f(signal(x))),
    **of("stft", lambda f, x: f(x, 4, 2, 4), rows=((12,),)),
    **of("istft", lambda f, x: f(ops.stft(x, 4, 2, 4), 4, 2, 4), rows=((12,),)),
    **of("extract_sequences", lambda f, x: f(x, 4, 2), rows=((12,),)),
    **of(
        "affine_transform",
        lambda f, x: f(x, turned(x)),
        "ops.image",
        **IMAGE,
    ),
    **of("crop_images", lambda f, x: f(x, 1, 1, target_height=3, target_width=3), "ops.image", **IMAGE),
    **of("elastic_transform", lambda f, x: f(x, seed=3), "ops.image", order=0, **IMAGE),
    **of("extract_patches", lambda f, x: f(x, (2, 2)), "ops.image", **IMAGE),
    **of("extract_patches_3d", lambda f, x: f(x, (2, 2, 2)), "ops.image", rows=((4, 4, 4, 2),)),
    **of("gaussian_blur rgb_to_grayscale sobel_edges", room="ops.image", **IMAGE),
    **of("hsv_to_rgb rgb_to_hsv", lambda f, x: f(ops.sigmoid(x)), "ops.image", **IMAGE),
    **of("map_coordinates", lambda f, x: f(x[0], ops.ones((3, 5), x.dtype), 1), "ops.image", gathers=True, **IMAGE),
    **of("pad_images", lambda f, x: f(x, 1, 1, target_height=9, target_width=9), "ops.image", **IMAGE),
    **of(
        "perspective_transform",
        lambda f, x: f(
            x,
            ops.ones((ops.shape(x)[0], 1, 1)) * ops.convert_to_tensor([[[0.0, 0], [0, 5], [5, 0], [5, 5]]], x.dtype),
            ops.ones((ops.shape(x)[0], 1, 1)) * ops.convert_to_tensor([[[0.0, 1], [0, 5], [5, 0], [5, 4]]], x.dtype),
        ),
        "ops.image",
        order=0,
        **IMAGE,
    ),
    **of("resize", lambda f, x: f(x, (4, 4)), "ops.image", **IMAGE),
    **of(
        "scale_and_translate",
        lambda f, x: f(x, (ops.shape(x)[0], 4, 4, 3), ops.array([0.6, 0.6]), ops.array([0.0, 0.0]), (1, 2), "linear"),
        "ops.image",
        **IMAGE,
    ),
    **of("ssim", lambda f, x, y: f(x, y, filter_size=3), "ops.image", rows=((6, 6, 3), (6, 6, 3))),
    # Losses
    **of("binary_crossentropy", lambda f, x, y: f(ops.sigmoid(x), ops.sigmoid(y)), **TWO),
    **of("categorical_crossentropy", lambda f, x, y: f(ops.softmax(x), ops.softmax(y)), **TWO),
    **of("sparse_categorical_crossentropy", lambda f, x, y: f(whole_numbers(x), ops.softmax(y)), **TWO),
    **of(
        "ctc_loss",
        lambda f, x: f(
            ops.ones((ops.shape(x)[0], 2), "int32"),
            ops.cast(x, "float32"),
            ops.full((ops.shape(x)[0],), 2, "int32"),
            ops.full((ops.shape(x)[0],), 5, "int32"),
        ),
        rows=((5, 4),),
    ),
    **of(
        "ctc_decode", lambda f, x: f(ops.softmax(x), ops.full((ops.shape(x)[0],), 5, "int32")), rows=((5, 4),), order=0
    ),
    # Control flow
    **of("cond", lambda f, x: f(ops.sum(x) > 0, lambda: 2.0 * x, lambda: x * x)),
    **of("switch", lambda f, x: f(ops.argmax(ops.sum(x, 0)) % 2, [lambda y: 2.0 * y, lambda y: y * y], x)),
    **of("fori_loop", lambda f, x: f(0, 3, lambda _, state: 1.1 * state, x)),
    **of("while_loop", lambda f, x: f(lambda i, s: i < 3, lambda i, s: (i + 1, 1.1 * s), (0, x))[1]),
    **of("map vectorized_map", lambda f, x: f(lambda row: row * ops.sum(row), x)),
    **of("vectorize", lambda f, x: f(lambda row: ops.sum(row), signature="(n)->()")(x)),
    **of("scan", lambda f, x: f(lambda carry, row: (carry + row, carry * row), ops.zeros(4, x.dtype), x)[1]),
    **of("associative_scan", lambda f, x: f(lambda a, b: a + b, x, axis=1)),
    **of("jvp", lambda f, x: f(lambda y: y**3, (x,), (ops.ones_like(x),))[1], order=0),
    **of("custom_gradient", lambda f, x: tripled(x)),
    # Random numbers
    **of("normal truncated_normal uniform", lambda f, x: x * f(ops.shape(x), seed=3, dtype=x.dtype), "random"),
    **of("beta", lambda f, x: x * f(ops.shape(x), 2.0, 3.0, seed=3, dtype=x.dtype), "random"),
    **of("gamma", lambda f, x: x * f(ops.shape(x), 2.0, seed=3, dtype=x.dtype), "random"),
    **of("binomial", lambda f, x: x * f(ops.shape(x), 5.0, 0.3, seed=3, dtype=x.dtype), "random"),
    **of("randint", lambda f, x: f(ops.shape(x), 0, 9, seed=3), "random", order=0),
    **of("categorical", lambda f, x: f(x, 2, seed=3), "random", order=0),
    **of("dropout", lambda f, x: f(x, 0.4, seed=3), "random"),
    **of("shuffle", lambda f, x: f(x, axis=1, seed=3), "random"),
    # Places of rows
    **of("arange", lambda f, x: f(ops.shape(x)[0]), order=0),
    **of("zeros ones empty", lambda f, x: ops.shape(f((ops.shape(x)[0], 3))), order=0),
    **of("full", lambda f, x: f((ops.shape(x)[0], 3), 2.0), order=0),
    **of("eye identity tri", lambda f, x: f(ops.shape(x)[0]), order=0),
    # Of the batch
    **of("allclose", lambda f, x, y: f(x, y), order=0, **TWO),
    **of("bincount", lambda f, x: f(whole_numbers(x), minlength=4), order=0),
    **of("histogram", lambda f, x: f(x[:, 0], 4, (-1.0, 1.0)), order=0),
    **of("nonzero", lambda f, x: f(x > 0), order=0),
    **of("unique", lambda f, x: f(whole_numbers(x)), order=0),
    **of("segment_max segment_min segment_prod segment_sum", lambda f, x: f(x, whole_numbers(x), 4)),
    **of("flipud"),
    **of("diag diagflat", lambda f, x: f(x[:, 0])),
    **of("meshgrid", lambda f, x: f(x[:, 0], x[:, 1])),
    **of("vsplit", lambda f, x: f(x, [1])),
    **of("linspace", lambda f, x, y: f(x, y, 3, axis=1), **TWO),
    **of("logspace", lambda f, x, y: f(x, y, 3, axis=1), **TWO),
    **of("geomspace", lambda f, x, y: f(x, y, 3), positive=True, **TWO),
    **of("convert_to_numpy", lambda f, x: f(x)),
}
"""Each function, along dims of each sample where it has a choice."""

OVER_BATCH: Mapping[str, Case] = {
    **of(AXIS, lambda f, x: f(x, axis=0)),
    **of("count_nonzero", lambda f, x: f(x, axis=0), order=0),
    **of("quantile nanquantile", lambda f, x: f(x, 0.3, axis=0)),
    **of("percentile nanpercentile", lambda f, x: f(x, 30.0, axis=0)),
    **of("moments", lambda f, x: f(x, axes=[0])),
    **of("softmax log_softmax normalize sort argsort diff cumsum flip", lambda f, x: f(x, axis=0)),
    **of("take", lambda f, x: f(x, [0, 1], axis=0)),
    **of("take_along_axis", lambda f, x: f(x, ops.argsort(x, axis=0), axis=0)),
    **of("roll", lambda f, x: f(x, 1, axis=0)),
    **of("matmul", lambda f, x: f(x, ops.transpose(x))),
    **of("einsum", lambda f, x, y: f("bi,bj->ij", x, y), **TWO),
    **of("concatenate stack", lambda f, x, y: f([x, y], axis=0), **TWO),
    **of("repeat", lambda f, x: f(x, 2, axis=0)),
    **of("tile", lambda f, x: f(x, [2, 1])),
    **of("split", lambda f, x, y: f(ops.concatenate([x, y], 0), 2, axis=0), **TWO),
    **of("get_item", lambda f, x: f(x, 0)),
    **of("shuffle", lambda f, x: f(x, seed=3), "random"),
    **of("one_hot", lambda f, x: f(ops.arange(ops.shape(x)[0]), 9), order=0),
}
"""Functions that have a choice, over the samples or along them."""

NO_TENSORS: Mapping[str, str] = {
    **dict.fromkeys(("ops.bartlett", "ops.blackman", "ops.hamming", "ops.hanning", "ops.kaiser"), "windows"),
    **dict.fromkeys(("ops.dtype", "ops.is_tensor"), "says something of a tensor"),
}
"""Functions that compute nothing of samples."""
