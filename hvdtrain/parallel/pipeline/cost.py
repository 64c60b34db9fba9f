"""An estimate of what a call of a layer costs, by which a model is cut into equal stages."""

from math import prod
from typing import Any

import keras

from hvdtrain.compat.keras import flatten_layers, own_variables
from hvdtrain.layers.experts.mixture import MixtureOfExperts
from hvdtrain.state.placement import placed_tensor


def flops(node: Any) -> float:
    """Return the floating-point operations of one forward call for one sample, as an estimate.

    A matrix product, a convolution and the like take two for each element of a kernel at each position of the output;
    attention takes 4 x queries x keys x width besides, and an embedding or any other operation one for each element of
    its output. Of experts those that a token goes to count. Layers that are split along tp count as whole ones, so that
    all ranks, whose slices may differ by one, cut alike. Unknown dims, such as a sequence of any length, count as 1.
    """
    produced = float(sum(_elements(tensor) for tensor in node.outputs))
    operation = node.operation
    if not isinstance(operation, keras.Layer):
        return produced
    positions = max((_elements_before_last(tensor) for tensor in node.outputs), default=1)
    inner = [each for each in flatten_layers(operation) if not isinstance(each, keras.layers.Embedding)]
    products = 2.0 * positions * sum(map(_kernel_elements, inner))
    return produced + products + sum(_attention(each, node) for each in inner)


def _kernel_elements(layer: Any) -> int:
    """Return how many elements of the layer's own kernels a position is multiplied with."""
    if isinstance(layer, MixtureOfExperts):
        of_an_expert = sum(prod(_whole_shape(kernel)[1:]) for kernel in (layer.kernel_in, layer.kernel_out))
        return prod(layer.router.shape) + layer.top_k * of_an_expert
    variables = own_variables(layer)
    return sum(prod(_whole_shape(v)) for v in variables if len(v.shape) > 1)


def _whole_shape(variable: Any) -> tuple[int, ...]:
    return placed_tensor(variable).global_shape


def _attention(layer: Any, node: Any) -> float:
    if not isinstance(layer, keras.layers.MultiHeadAttention | keras.layers.GroupQueryAttention):
        return 0.0
    heads = getattr(layer, "num_heads", None) or layer.num_query_heads
    width = heads * (getattr(layer, "key_dim", None) or layer.head_dim)
    queries = _elements_before_last(node.outputs[0])
    keys = max(_elements_before_last(tensor) for tensor in node.input_tensors)
    return 4.0 * queries * keys * width


def _elements(tensor: Any) -> int:
    return prod(dim or 1 for dim in tensor.shape[1:])


def _elements_before_last(tensor: Any) -> int:
    return prod(dim or 1 for dim in tensor.shape[1:-1])
