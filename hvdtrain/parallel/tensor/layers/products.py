"""Dense, EinsumDense and convolutions whose kernel is cut.

A kernel that is cut along an output dim makes a column parallel layer: each rank computes its features from the whole
input, whose gradients are added up. One that is cut along a dim which the product sums over makes a row parallel layer:
each rank has its features of the input, and the products are added up before bias and activation.
"""

from typing import Any

import keras

from hvdtrain.compat.keras import kernel_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.cuts import Cut
from hvdtrain.parallel.tensor.layers.base import (
    Group,
    check_activation,
    check_additive,
    computes_as,
    described,
    refuse_other_weights,
    replace_call,
)

CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)


class SlicedProduct:
    """A Dense, EinsumDense or convolution layer with a cut kernel; see the module.

    Args:
        layer: the layer.
        cut: of its kernel.
        enters: whether this layer takes care of its own input; False within an attention layer, which does.

    Raises:
        ConfigError: a dim that can be neither an input nor an output, or a layer that does more than the product.
    """

    def __init__(self, layer: Any, cut: Cut, *, enters: bool = True) -> None:
        self._layer = layer
        self._cut = cut
        self._enters = enters
        refuse_other_weights(layer)
        kernel = kernel_of(layer)
        check_additive(kernel, layer)
        self.column, self._dim = _role(layer, cut)
        if self.column:
            check_activation(layer, cut.whole[cut.dim])
        elif cut.fused:
            raise ConfigError(
                f"{cut.fused} is for the output of a layer, and dim {cut.dim} of {kernel.path!r} is the input "
                f"of {described(layer)}: write 'tp' there, and split what it is given into its blocks."
            )

    def further_cuts(self) -> dict[int, tuple[Any, Cut]]:
        """See `SlicedLayer`: the bias of a column parallel layer is cut like its output."""
        bias = self._layer.bias
        if bias is None or not self.column:
            return {}
        if bias.shape.rank < -self._dim or bias.shape[self._dim] == 1:
            raise ConfigError(f"The bias of {described(self._layer)} spans a dim that is cut: leave the layer whole.")
        check_additive(bias, self._layer)
        shape = tuple(int(n) for n in bias.shape)
        return {id(bias): (bias, self._cut.along(shape, len(shape) + self._dim))}

    def shared(self) -> list[Any]:
        """See `SlicedLayer`: the bias of a row parallel layer."""
        return [] if self.column or self._layer.bias is None else [self._layer.bias]

    def install(self, group: Group, name: str) -> None:
        """See `SlicedLayer`."""
        layer = self._layer
        if self.column and not self._enters:
            return
        if not self.column and not isinstance(layer, keras.layers.EinsumDense):
            least = layer.input_spec.min_ndim
            layer.input_spec = keras.layers.InputSpec(min_ndim=least, axes={-1: self._cut.length})
        replace_call(layer, self._columns(group, name) if self.column else self._rows(group, name))

    def _columns(self, group: Group, name: str) -> Any:
        layer = self._layer

        def call(inputs: Any, training: bool | None = None) -> Any:
            with group.record.call(described(layer)) as flow:
                outputs = _finished(layer, _product(layer, group.enter(inputs, name, flow)))
                flow.gives.append((outputs, self._dim))
                flow.blocks = self._cut.blocks if self._cut.fused else ()
            return outputs

        return call

    def _rows(self, group: Group, name: str) -> Any:
        layer = self._layer

        def call(inputs: Any, training: bool | None = None) -> Any:
            with group.record.call(described(layer)) as flow:
                flow.takes.append((inputs, self._dim))
                return group.left(_finished(layer, group.leave(_product(layer, inputs), name)), flow)

        return call


def is_product(layer: Any) -> bool:
    """Whether a layer is one whose kernel can be cut."""
    kinds = (keras.layers.Dense, keras.layers.EinsumDense, *CONVOLUTIONS)
    return any(computes_as(layer, kind) for kind in kinds)


def _role(layer: Any, cut: Cut) -> tuple[bool, int]:
    """Return whether a layer is column parallel, and the dim of its output, or else of its input, that is cut."""
    if isinstance(layer, keras.layers.EinsumDense):
        return _role_in_equation(layer, cut.dim)
    if isinstance(layer, CONVOLUTIONS):
        return _role_in_convolution(layer, cut)
    return cut.dim == 1, -1


def _role_in_convolution(layer: Any, cut: Cut) -> tuple[bool, int]:
    plain = layer.data_format == "channels_last" and layer.groups == 1 and layer.padding != "causal"
    if not plain or cut.dim < len(cut.whole) - 2:
        raise ConfigError(
            "A convolution can be cut along its filters or its channels, with data_format='channels_last', one group "
            f"and no causal padding. Received: {described(layer)}, dim {cut.dim} of {cut.whole}, "
            f"data_format={layer.data_format!r}, groups={layer.groups}, padding={layer.padding!r}."
        )
    return cut.dim == len(cut.whole) - 1, -1


def _role_in_equation(layer: Any, dim: int) -> tuple[bool, int]:
    inputs, kernel, output = layer.equation.replace(" ", "").replace("->", ",").split(",")
    label = kernel[dim]
    if label in inputs and label in output:
        raise ConfigError(
            f"{described(layer)} uses the dim {label!r} of its kernel for input and output alike, and cannot be cut "
            f"along it. Received: {layer.equation!r}."
        )
    column = label in output
    spec = output if column else inputs
    if "..." in spec[spec.index(label) :]:
        raise ConfigError(
            f"{described(layer)} can be cut along dims behind the ellipsis only. Received: {layer.equation!r}, dim "
            f"{label!r}."
        )
    return column, spec.index(label) - len(spec)


def _product(layer: Any, inputs: Any) -> Any:
    if isinstance(layer, keras.layers.EinsumDense):
        return keras.ops.einsum(layer.equation, inputs, layer.kernel)
    if isinstance(layer, CONVOLUTIONS):
        return layer.convolution_op(inputs, layer.kernel)
    return keras.ops.matmul(inputs, layer.kernel)


def _finished(layer: Any, outputs: Any) -> Any:
    """Return a product with bias and activation; features are last, or an EinsumDense's bias has the output's shape."""
    if layer.bias is not None:
        outputs = keras.ops.add(outputs, layer.bias)
    return outputs if layer.activation is None else layer.activation(outputs)
