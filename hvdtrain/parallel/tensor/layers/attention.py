"""Attention by heads: each rank computes some of them."""

from typing import Any

import keras

from hvdtrain.compat.keras import attention_projections, kernel_of, mask_of, set_mask
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.cuts import Cut
from hvdtrain.parallel.tensor.flow.record import LayerCall
from hvdtrain.parallel.tensor.layers.base import Group, computes_as, described, replace_call
from hvdtrain.parallel.tensor.layers.products import SlicedProduct

KINDS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


class SlicedAttention:
    """A MultiHeadAttention or GroupQueryAttention whose projections are cut by heads.

    Query, key and value each take the whole input once, so that the gradients of an input that several use are added up
    in one message.

    Raises:
        ConfigError: a projection that is cut otherwise, or one that is whole.
    """

    def __init__(self, layer: Any, cuts: dict[int, Cut]) -> None:
        self._layer = layer
        self._inner: list[SlicedProduct] = []
        for inner, heads in attention_projections(layer):
            cut = cuts.get(id(kernel_of(inner)))
            if cut is None or cut.dim != heads or cut.fused:
                raise ConfigError(
                    f"{described(layer)} is cut by heads: all of its kernels are, dim 1 of query, key, value and gate, "
                    f"and dim 0 of attention_output. Received: {kernel_of(inner).path!r} "
                    f"{'whole' if cut is None else f'cut {cut.description}'}."
                )
            self._inner.append(SlicedProduct(inner, cut, enters=False))

    def further_cuts(self) -> dict[int, tuple[Any, Cut]]:
        """See `SlicedLayer`: the biases of query, key and value."""
        return {key: found for inner in self._inner for key, found in inner.further_cuts().items()}

    def shared(self) -> list[Any]:
        """See `SlicedLayer`: the bias of the output."""
        return [variable for inner in self._inner for variable in inner.shared()]

    def install(self, group: Group, name: str) -> None:
        """See `SlicedLayer`."""
        for inner in self._inner:
            inner.install(group, f"{name}/attention_output")
        layer, whole_call = self._layer, self._layer.call

        def call(query: Any, value: Any, key: Any = None, **options: Any) -> Any:
            if options.get("return_attention_scores"):
                raise ConfigError(
                    f"{described(layer)} is cut by heads, and no rank has the scores of all of them: leave out "
                    "return_attention_scores=True, or the layer whole."
                )
            with group.record.call(described(layer)) as flow:
                entered = _Entered(group, name, flow)
                outputs = whole_call(entered(query), entered(value), None if key is None else entered(key), **options)
                return group.left(outputs, flow)

        replace_call(layer, call)


class _Entered:
    """Inputs of an attention layer, each of which enters once however often it is used."""

    def __init__(self, group: Group, name: str, flow: LayerCall) -> None:
        self._group = group
        self._flow = flow
        self._name = name
        self._known: list[tuple[Any, Any]] = []

    def __call__(self, x: Any) -> Any:
        for before, entered in self._known:
            if before is x:
                return entered
        entered = self._group.enter(x, self._name, self._flow)
        mask = mask_of(x)
        if mask is not None:
            # Keras' attention takes the masks off its inputs.
            set_mask(entered, mask)
            set_mask(x, None)
        self._known.append((x, entered))
        return entered


def is_attention(layer: Any) -> bool:
    """Whether a layer is Keras' attention by heads."""
    return any(computes_as(layer, kind) for kind in KINDS)


def inner_layers(layer: Any) -> list[Any]:
    """Return the projections of an attention layer."""
    return [inner for inner, _ in attention_projections(layer)]
