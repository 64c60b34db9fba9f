"""Sharded layers: Dense, EinsumDense, convolutions, multi-head attention, embeddings.

A kernel sharded along an output dim makes a column-parallel layer: each rank computes its features from the full input,
whose gradients are summed. One sharded along a contracted dim makes a row-parallel layer: each rank has its features of
the input, and the products are summed before bias and activation.
"""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.differentiable import gather_from
from hvdtrain.compat.keras import embeddings_of, flatten_layers, kernel_of, mask_of, own_variables, set_mask
from hvdtrain.compat.keras_attention import attention_projections
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.cuts import Cut
from hvdtrain.parallel.tensor.flow.trace import LayerCall
from hvdtrain.parallel.tensor.layers.base import (
    Group,
    TensorParallelLayer,
    check_activation,
    check_additive,
    computes_as,
    described,
    refuse_other_weights,
    replace_call,
)
from hvdtrain.runtime.compiled import numbered

CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)


class TensorParallelProduct:
    """Column- or row-parallel Dense, EinsumDense or convolution.

    `enters` is False inside an attention layer, which prepares the input. Raises ConfigError for a dim that is neither
    input nor output, or a layer that does more than the product.
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

    def dependent_cuts(self) -> dict[int, tuple[Any, Cut]]:
        """Return the bias of a column-parallel layer, sharded like its output."""
        bias = self._layer.bias
        if bias is None or not self.column:
            return {}
        if bias.shape.rank < -self._dim or bias.shape[self._dim] == 1:
            raise ConfigError(f"The bias of {described(self._layer)} spans a dim that is cut: leave the layer whole.")
        check_additive(bias, self._layer)
        shape = tuple(int(n) for n in bias.shape)
        return {id(bias): (bias, self._cut.along(shape, len(shape) + self._dim))}

    def shared(self) -> list[Any]:
        """Return the bias of a row-parallel layer."""
        return [] if self.column or self._layer.bias is None else [self._layer.bias]

    def install(self, group: Group, name: str) -> None:
        """Replace the layer's call."""
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
                outputs = _finished(layer, _product(layer, group.gather_input(inputs, name, flow)))
                flow.gives.append((outputs, self._dim))
                flow.blocks = self._cut.blocks if self._cut.fused else ()
            return outputs

        return call

    def _rows(self, group: Group, name: str) -> Any:
        layer = self._layer

        def call(inputs: Any, training: bool | None = None) -> Any:
            with group.record.call(described(layer)) as flow:
                flow.takes.append((inputs, self._dim))
                return group.record_output(_finished(layer, group.reduce_output(_product(layer, inputs), name)), flow)

        return call


def is_product(layer: Any) -> bool:
    """Return whether a layer's kernel can be sharded."""
    kinds = (keras.layers.Dense, keras.layers.EinsumDense, *CONVOLUTIONS)
    return any(computes_as(layer, kind) for kind in kinds)


def _role(layer: Any, cut: Cut) -> tuple[bool, int]:
    """Return whether a layer is column-parallel, and the sharded dim of its output, or else input."""
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
    """Apply bias and activation; features are last, or an EinsumDense's bias has the output's shape."""
    if layer.bias is not None:
        outputs = keras.ops.add(outputs, layer.bias)
    return outputs if layer.activation is None else layer.activation(outputs)


KINDS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


class TensorParallelAttention:
    """MultiHeadAttention or GroupQueryAttention with projections sharded by heads.

    Query, key and value enter together, so that the gradients of a shared input are reduced in one message. Raises
    ConfigError: a projection that is sharded otherwise, or not at all.
    """

    def __init__(self, layer: Any, cuts: dict[int, Cut]) -> None:
        self._layer = layer
        self._inner: list[TensorParallelProduct] = []
        for inner, heads in attention_projections(layer):
            cut = cuts.get(id(kernel_of(inner)))
            if cut is None or cut.dim != heads or cut.fused:
                raise ConfigError(
                    f"{described(layer)} is cut by heads: all of its kernels are, dim 1 of query, key, value and gate, "
                    f"and dim 0 of attention_output. Received: {kernel_of(inner).path!r} "
                    f"{'whole' if cut is None else f'cut {cut.description}'}."
                )
            self._inner.append(TensorParallelProduct(inner, cut, enters=False))

    def dependent_cuts(self) -> dict[int, tuple[Any, Cut]]:
        """Return the biases of query, key and value."""
        return {key: found for inner in self._inner for key, found in inner.dependent_cuts().items()}

    def shared(self) -> list[Any]:
        """Return the bias of the output."""
        return [variable for inner in self._inner for variable in inner.shared()]

    def install(self, group: Group, name: str) -> None:
        """Replace the layer's call."""
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
                return group.record_output(outputs, flow)

        replace_call(layer, call)


class _Entered:
    """Inputs of an attention layer; each enters once, however often it is used."""

    def __init__(self, group: Group, name: str, flow: LayerCall) -> None:
        self._group = group
        self._flow = flow
        self._name = name
        self._known: list[tuple[Any, Any]] = []

    def __call__(self, x: Any) -> Any:
        for before, entered in self._known:
            if before is x:
                return entered
        entered = self._group.gather_input(x, self._name, self._flow)
        mask = mask_of(x)
        if mask is not None:
            # Keras' attention takes the masks off its inputs.
            set_mask(entered, mask)
            set_mask(x, None)
        self._known.append((x, entered))
        return entered


def is_attention(layer: Any) -> bool:
    """Return whether a layer computes as Keras' multi-head attention."""
    return any(computes_as(layer, kind) for kind in KINDS)


def inner_layers(layer: Any) -> list[Any]:
    """Return an attention layer's projections."""
    return [inner for inner, _ in attention_projections(layer)]


class TensorParallelEmbedding:
    """Embedding or ReversibleEmbedding with a sharded table.

    Sharded along the vocabulary, each rank looks up its own rows; others contribute zeros to the sum. Sharded along the
    width, each rank looks up its columns, which are gathered. A reversible one sharded along the vocabulary returns
    each rank's shard of the logits. Raises ConfigError for a reversible one sharded along the width, or with a second
    table that is sharded otherwise.
    """

    def __init__(self, layer: Any, cuts: dict[int, Cut]) -> None:
        self._layer = layer
        self._cut = cuts.get(id(embeddings_of(layer)))
        self._reverse = cuts.get(id(getattr(layer, "reverse_embeddings", None)))
        refuse_other_weights(layer)
        check_additive(embeddings_of(layer), layer)
        if not isinstance(layer, keras.layers.ReversibleEmbedding):
            return
        held = {"embeddings": (self._cut, 0)}
        if not layer.tie_weights:
            held["reverse_embeddings"] = (self._reverse, 1)
        for name, (cut, dim) in held.items():
            if cut is None or cut.dim != dim:
                raise ConfigError(
                    f"{described(layer)} is cut along the vocabulary: dim 0 of its embeddings, and dim 1 of its "
                    f"reverse_embeddings where it has them. Received: {name} "
                    f"{'whole' if cut is None else f'cut along dim {cut.dim}'}."
                )

    def dependent_cuts(self) -> dict[int, tuple[Any, Cut]]:
        """Return none."""
        return {}

    def shared(self) -> list[Any]:
        """Return none."""
        return []

    def install(self, group: Group, name: str) -> None:
        """Replace the layer's call."""
        layer, whole_call = self._layer, self._layer.call
        assert self._cut is not None, "a layer is made for a cut"
        look_up = self._by_vocabulary(group, name) if self._cut.dim == 0 else self._by_width(group, name)

        def call(inputs: Any, reverse: bool = False) -> Any:
            with group.record.call(described(layer)) as flow:
                if not reverse:
                    outputs = look_up(inputs)
                    _set_mask(layer, inputs, outputs)
                    return outputs
                outputs = whole_call(group.gather_input(inputs, f"{name}/reverse", flow), reverse=True)
                flow.gives.append((outputs, -1))
                return outputs

        reversible = isinstance(layer, keras.layers.ReversibleEmbedding)
        replace_call(layer, call if reversible else lambda inputs: call(inputs))

    def _by_vocabulary(self, group: Group, name: str) -> Any:
        layer, cut = self._layer, self._cut
        assert cut is not None

        def look_up(inputs: Any) -> Any:
            vocabulary = cut.whole[0]
            tokens = tf.cast(inputs, tf.int32) if inputs.dtype not in (tf.int32, tf.int64) else inputs
            tokens = tf.where(tokens < 0, tokens + vocabulary, tokens)  # as Keras counts them
            own = (tokens >= cut.start) & (tokens < cut.start + cut.length)
            known = (tokens >= 0) & (tokens < vocabulary)
            # The look-up refuses a token that no rank knows, as it does in one process.
            others = tf.where(known, tf.zeros_like(tokens), vocabulary + tf.abs(tokens))
            rows = tf.where(own, tokens - cut.start, others)
            found = keras.ops.take(layer.embeddings, rows, axis=0)
            found = tf.where(own[..., tf.newaxis], found, tf.zeros_like(found))
            return tf.cast(group.all_reduce(found, name), layer.compute_dtype)

        return look_up

    def _by_width(self, group: Group, name: str) -> Any:
        whole_call = self._layer.call

        def look_up(inputs: Any) -> Any:
            found = whole_call(inputs)
            return gather_from(found, group.exchange, found.shape.rank - 1, name=numbered(f"{name}/output"))

        return look_up


def is_embedding(layer: Any) -> bool:
    """Return whether a layer computes as one of Keras' embeddings."""
    return any(computes_as(layer, kind) for kind in (keras.layers.Embedding, keras.layers.ReversibleEmbedding))


def _set_mask(layer: Any, inputs: Any, outputs: Any) -> None:
    """Set the padding mask as ReversibleEmbedding does in its call; Embedding does so afterwards."""
    if layer.mask_zero and isinstance(layer, keras.layers.ReversibleEmbedding):
        set_mask(outputs, keras.ops.not_equal(inputs, 0))


def tensor_parallel_layers(model: Any, cuts: dict[int, Cut]) -> list[tuple[Any, TensorParallelLayer]]:
    """Return a model's sharded layers with their replacement. Raises ConfigError for unsupported ones."""
    found: list[tuple[Any, TensorParallelLayer]] = []
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


def _sliced(layer: Any, held: list[Any], cuts: dict[int, Cut]) -> TensorParallelLayer:
    if is_attention(layer):
        return TensorParallelAttention(layer, cuts)
    if is_product(layer) and id(kernel_of(layer)) in cuts:
        return TensorParallelProduct(layer, cuts[id(kernel_of(layer))])
    fused = next((cuts[id(variable)].fused for variable in held), None)
    if is_embedding(layer) and fused is None:
        return TensorParallelEmbedding(layer, cuts)
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
    """Yield every layer of `model` once, outer before inner."""
    seen: set[int] = set()
    for layer in flatten_layers(model):
        if id(layer) not in seen and isinstance(layer, keras.Layer):
            seen.add(id(layer))
            yield layer
