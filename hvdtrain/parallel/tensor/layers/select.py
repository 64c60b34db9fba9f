"""Which layers hold slices, and what becomes of them."""

from collections.abc import Iterator
from typing import Any

import keras

from hvdtrain.compat.keras import flatten_layers, kernel_of, own_variables
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.cuts import Cut
from hvdtrain.parallel.tensor.layers.attention import SlicedAttention, inner_layers, is_attention
from hvdtrain.parallel.tensor.layers.base import SlicedLayer, described
from hvdtrain.parallel.tensor.layers.embedding import SlicedEmbedding, is_embedding
from hvdtrain.parallel.tensor.layers.products import SlicedProduct, is_product


def sliced_layers(model: Any, cuts: dict[int, Cut]) -> list[tuple[Any, SlicedLayer]]:
    """Return the layers of `model` that hold slices, with what they do about it.

    Args:
        model: a built model.
        cuts: of its variables, by their ids.

    Raises:
        ConfigError: a layer that holds a cut variable and is none of those that can be cut; it is named.
    """
    found: list[tuple[Any, SlicedLayer]] = []
    covered: set[int] = set()
    for layer in _outermost_first(model):
        if id(layer) in covered:
            continue
        held = [variable for variable in own_variables(layer) if id(variable) in cuts]
        inner = inner_layers(layer) if is_attention(layer) else []
        held += [variable for each in inner for variable in own_variables(each) if id(variable) in cuts]
        if held:
            covered.update(id(each) for each in inner)
            found.append((layer, _sliced(layer, held, cuts)))
    return found


def _sliced(layer: Any, held: list[Any], cuts: dict[int, Cut]) -> SlicedLayer:
    if is_attention(layer):
        return SlicedAttention(layer, cuts)
    if is_product(layer) and id(kernel_of(layer)) in cuts:
        return SlicedProduct(layer, cuts[id(kernel_of(layer))])
    fused = next((cuts[id(variable)].fused for variable in held), None)
    if is_embedding(layer) and fused is None:
        return SlicedEmbedding(layer, cuts)
    if is_product(layer):
        raise ConfigError(
            f"The bias of {described(layer)} follows its kernel, which no rule cuts. Received: a rule for "
            f"{held[0].path!r} alone."
        )
    if is_embedding(layer):
        raise ConfigError(
            f"{fused} is for the output of Dense, EinsumDense and convolutions. Received: a rule with it for "
            f"{held[0].path!r} of {described(layer)}."
        )
    raise ConfigError(
        f"{described(layer)} holds {held[0].path!r}, which a rule cuts, and cannot be split: Dense, EinsumDense, "
        "convolutions, Embedding, ReversibleEmbedding, MultiHeadAttention and GroupQueryAttention can. Build it of "
        "these, or take its variables out of the rules."
    )


def _outermost_first(model: Any) -> Iterator[Any]:
    """Yield every layer of `model` once, a layer before those inside it."""
    seen: set[int] = set()
    for layer in flatten_layers(model):
        if id(layer) not in seen and isinstance(layer, keras.Layer):
            seen.add(id(layer))
            yield layer
