"""Quantization-aware training: kernels are trained as they will be once they have fewer bits.

In the forward pass a layer has the kernel that Keras' `quantize` would give it, and inputs rounded as Keras rounds them
there; the gradient passes as if nothing had been rounded (the straight-through estimator of Bengio et al. 2013,
arXiv:1308.3432). A sample is rounded by itself, so that ranks exchange nothing more.
"""

import math
import re
from collections.abc import Callable
from typing import Any, get_args

import keras
import tensorflow as tf

from hvdtrain.compat.keras import flatten_layers, kernel_of, with_kernel
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.tuning import FakeMode
from hvdtrain.export.adapters import adapted_layers
from hvdtrain.export.pruning import KERNELS, input_dims, letters_of, refuse_slices
from hvdtrain.export.tensors import is_rounded, quantization_of
from hvdtrain.state.layer_states import forget_traces
from hvdtrain.state.variables import unwrap

BLOCK = 128
"""Inputs that share a scale in Keras' int4."""
LOWEST, HIGHEST = -8.0, 7.0
"""Of 4 bits."""


def fake_quantize(model: keras.Model, mode: FakeMode = "int8", *, layers: str | None = None) -> list[str]:
    """Train a model as it will be with fewer bits, and return the layers whose kernels are rounded.

    Call it before `compile`; `finish_fake_quantize` takes it back before `model.quantize(mode)` or an export. Whatever
    trains the model has it, `Model.fit` too. Weights stay as they are: checkpoints are those of the plain model.

    Args:
        model: a built model.
        mode: `int8`, or `int4` for kernels in groups of 128 inputs, as Keras does by default.
        layers: an expression that is searched for in the paths of layers; None: all Dense, EinsumDense, convolutions.
            Of convolutions, which LiteRT quantizes to 8 bits and Keras does not, the kernel alone is rounded.

    Raises:
        ConfigError: another mode, no layer of that name, or one that is quantized, has an adapter, or is rounded.

    Example::

        hvdtrain.fake_quantize(model, "int4")
        hvdtrain.Trainer(model, "adam", loss).fit(x, y)
        hvdtrain.finish_fake_quantize(model)
        model.quantize("int4")
    """
    if mode not in get_args(FakeMode):
        raise ConfigError(f"fake_quantize takes {' or '.join(get_args(FakeMode))}. Received: {mode!r}.")
    kinds = KERNELS if mode == "int8" else KERNELS[:2]  # nobody has convolutions of 4 bits in groups
    able = [layer for layer in flatten_layers(model) if layer.built and isinstance(layer, kinds)]
    found = [layer for layer in able if re.search(layers or "", layer.path)]
    if not found:
        named = f" whose path has {layers!r}" if layers else ""
        raise ConfigError(f"fake_quantize finds no Dense, EinsumDense or convolution{named}. Is the model built?")
    refuse_slices(found, "fake_quantize")
    adapted = adapted_layers(model)
    for layer in found:
        states = {
            "is quantized": quantization_of(layer),
            "has an adapter": layer in adapted,
            "is rounded": is_rounded(layer),
        }
        state = next((words for words, holds in states.items() if holds), None)
        if state is not None:
            raise ConfigError(f"fake_quantize takes layers that are not. The layer {layer.path!r} {state} already.")
    for layer in found:
        layer.call = Rounding(layer, mode)
    forget_traces(model)
    return [layer.path for layer in found]


def finish_fake_quantize(model: keras.Model) -> None:
    """Let a model compute with its weights again, before they are quantized or exported.

    A `Trainer` of before goes on with what it has compiled: make a new one, or call the model's own `predict`.

    Example::

        hvdtrain.fake_quantize(model)
        hvdtrain.Trainer(model, "adam", loss).fit(x, y)
        hvdtrain.finish_fake_quantize(model)
    """
    for layer in filter(is_rounded, flatten_layers(model)):
        del layer.call
    forget_traces(model)


class Rounding:
    """The `call` of a layer, with a rounded kernel.

    Args:
        layer: the layer.
        mode: see `fake_quantize`.
    """

    needs_whole_kernel = True

    def __init__(self, layer: Any, mode: FakeMode) -> None:
        self._layer, self._call = layer, layer.call
        self._round: Callable[[Any, list[int]], Any] = in_groups if mode == "int4" else dequantized
        rounds_inputs = mode == "int8" and isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense)
        self._input_dims = summed_inputs(layer) if rounds_inputs else []

    def __call__(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Compute the layer's outputs."""
        layer = self._layer
        value = tf.convert_to_tensor(unwrap(kernel_of(layer)))  # in its own precision
        rounded = straight_through(value, self._round(value, input_dims(layer)))
        if self._input_dims:
            inputs = keras.ops.cast(inputs, layer.compute_dtype)
            inputs = straight_through(inputs, dequantized(inputs, self._input_dims))
        with with_kernel(layer, keras.ops.cast(rounded, layer.compute_dtype)):
            return self._call(inputs, *args, **options)


def straight_through(value: Any, rounded: Any) -> Any:
    """Return `rounded` with the gradient of `value`."""
    return value + keras.ops.stop_gradient(keras.ops.cast(rounded, value.dtype) - value)


def summed_inputs(layer: Any) -> list[int]:
    """Return the dims of a layer's inputs over which it sums, from the last one on: -1 …"""
    if isinstance(layer, keras.layers.Dense):
        return [-1]
    inputs, kernel, outputs = letters_of(layer)
    letters = inputs.replace("...", ".")
    return [place - len(letters) for place, letter in enumerate(letters) if letter in kernel and letter not in outputs]


def dequantized(value: Any, dims: list[int]) -> Any:
    """Return numbers as 8 bits have them, with one scale over these dims."""
    wide = keras.ops.cast(value, "float32")  # the scale of small numbers is too large for float16
    integers, scale = keras.quantizers.abs_max_quantize(wide, axis=tuple(dims))
    return keras.ops.cast(integers, "float32") / scale


def in_groups(kernel: Any, dims: list[int]) -> Any:
    """Return a kernel as Keras' 4 bits have it: a scale and a zero for each group of inputs of an output."""
    rows = math.prod(kernel.shape[dim] for dim in dims)
    # The formulas of keras.quantizers.abs_max_quantize_grouped_with_zero_point, which no graph can have.
    flat = tf.reshape(kernel, [rows, -1])  # as Keras does, whose inputs come first
    padded = tf.pad(flat, [[0, -rows % BLOCK], [0, 0]])
    groups = tf.reshape(padded, [-1, BLOCK, flat.shape[1]])
    low, high = (find(groups, axis=1, keepdims=True) for find in (tf.reduce_min, tf.reduce_max))
    scale = (high - low + keras.config.epsilon()) / (HIGHEST - LOWEST)
    zero = tf.clip_by_value(tf.round(-low / scale) + LOWEST, LOWEST, HIGHEST)
    integers = tf.clip_by_value(tf.round(groups / scale) + zero, LOWEST, HIGHEST)
    value = tf.reshape((integers - zero) * scale, padded.shape)[:rows]
    return tf.reshape(value, kernel.shape)
