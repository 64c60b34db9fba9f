"""Layers of a model with sequences sharded along `cp`: embeddings, products, experts, attention.

After its projections, an attention layer has all heads of this rank's positions. An all-to-all turns them into all
positions of some heads, attention is computed as in one process, and a second all-to-all restores this rank's
positions. All other layers compute each position independently.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.differentiable import exchange_parts, gather_to
from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras import mask_of
from hvdtrain.compat.keras_attention import attention_axes, query_kernel, replace_attention
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.layers.attention import DotProductAttention
from hvdtrain.layers.experts import MixtureOfExperts
from hvdtrain.parallel.context.positions import POSITION_DIM, Positions
from hvdtrain.parallel.tensor.flow.trace import BY_OUTPUT_RULE, FlowRecord
from hvdtrain.parallel.tensor.layers.base import calls_as, described, replace_call
from hvdtrain.parallel.tensor.layers.sharded import KINDS
from hvdtrain.runtime.compiled import numbered


@dataclass
class Group:
    """The context-parallel group."""

    exchange: Collectives
    record: FlowRecord = field(default_factory=FlowRecord)
    """Where layers record inputs and outputs while the model is checked."""
    cuts: bool = False
    """Whether sequences are sharded; False while the full model is traced."""
    lengths: frozenset[int] = frozenset()
    """Lengths of the sequences that are sharded."""

    @property
    def positions(self) -> Positions:
        """This rank's shard of the positions."""
        return Positions(self.exchange.index, self.exchange.size)

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Compute all positions inside this context, as in one process."""
        before, self.cuts = self.cuts, False
        try:
            yield
        finally:
            self.cuts = before


EMBEDDINGS = (keras.layers.Embedding, keras.layers.ReversibleEmbedding)


def is_embedding(layer: Any) -> bool:
    """Return whether a layer looks up rows like Keras' embeddings."""
    return any(calls_as(layer, kind) for kind in EMBEDDINGS)


def cut_lookups(layer: Any, group: Group) -> None:
    """Restrict an embedding to this rank's positions of the group's sequences.

    Other inputs, such as a class per sample, stay full. Position indices, 0 to a length, [positions] or [1,
    positions], are sharded like tokens.
    """
    whole_call, whole_mask, name = layer.call, layer.compute_mask, described(layer)
    lists = _Lists(name, group)

    def call(inputs: Any, *args: Any, **options: Any) -> Any:
        reverse = bool(args[0] if args else options.get("reverse", False))
        with group.record.call(name) as flow:
            if reverse:
                outputs = whole_call(inputs, *args, **options)
                flow.passes.append((inputs, outputs, all_but_last(inputs)))
                return outputs
            dim = _dim_of(inputs, group, lists)
            if dim is None:
                return whole_call(inputs, *args, **options)
            outputs = whole_call(group.positions.of(inputs, dim, what="sequence"), *args, **options)
            flow.gives.append((outputs, dim - outputs.shape.rank))
            mask = mask_of(outputs)  # a ReversibleEmbedding sets it here
            flow.gives += [] if mask is None else [(mask, dim - mask.shape.rank)]
            return outputs

    def compute_mask(inputs: Any, *args: Any, **options: Any) -> Any:
        with group.record.call(name) as flow:
            mask = whole_mask(inputs, *args, **options)
            dim = _dim_of(inputs, group, lists)
            if mask is None or dim is None:
                return mask
            mask = group.positions.of(mask, dim)
            flow.gives.append((mask, dim - mask.shape.rank))
            return mask

    replace_call(layer, call)
    vars(layer)["compute_mask"] = compute_mask


class _Lists:
    """Distinguishes 1-D inputs of an embedding: per position, or per sample.

    Decided while the model is checked, when the batch has no size; later, a batch may have as many samples as
    positions.
    """

    def __init__(self, name: str, group: Group) -> None:
        self._name = name
        self._group = group
        self._of_positions: bool | None = None
        self._lengths: frozenset[int] = frozenset()
        """Lengths of sequences for which this was decided."""

    def have_positions(self, size: int | None) -> bool:
        """Return the decision of the check. Raises ConfigError if the embedding is used for both."""
        if self._group.record.graph is None:
            return bool(self._of_positions)
        if self._lengths != self._group.lengths:
            self._of_positions, self._lengths = None, self._group.lengths
        positions = size in self._lengths
        if self._of_positions not in (None, positions):
            raise ConfigError(
                f"{self._name} looks up positions, and a number of each sample, and cannot tell them apart in a batch "
                f"of {size if positions else min(self._lengths)} samples: use an embedding for each."
            )
        self._of_positions = positions
        return positions


def _dim_of(inputs: Any, group: Group, lists: _Lists) -> int | None:
    """Return the sequence dimension of the lookup's indices; None if there is none or it stays full."""
    rank = inputs.shape.rank
    if rank == 1:
        return 0 if lists.have_positions(inputs.shape[0]) and group.cuts else None
    if not group.cuts or not rank or inputs.shape[POSITION_DIM] not in group.lengths:
        return None
    return POSITION_DIM


def cut_output(layer: Any, group: Group) -> None:
    """Make `layer` return only this rank's positions of its output."""
    whole_call, name = layer.call, described(layer)

    def call(*args: Any, **options: Any) -> Any:
        outputs = whole_call(*args, **options)
        with group.record.call(name + BY_OUTPUT_RULE) as flow:
            if not group.cuts:
                return keras.ops.copy(outputs)
            own = group.positions.of(outputs, what=f"output of {name}")
            flow.gives.append((own, POSITION_DIM - own.shape.rank))
            return own

    replace_call(layer, call)


def all_but_last(inputs: Any) -> Any:
    """Return a dim mapping that allows sharding every dim but the last."""
    last = int(inputs.shape.rank) - 1
    return lambda dim: None if dim == last else dim


def is_dense(layer: Any) -> bool:
    """Return whether a layer is a Keras Dense or EinsumDense."""
    return calls_as(layer, keras.layers.Dense) or calls_as(layer, keras.layers.EinsumDense)


def note_dense(layer: Any, group: Group) -> None:
    """Make `layer` record which sharded dims it passes through."""
    call = layer.call

    def noting(inputs: Any, *args: Any, **options: Any) -> Any:
        with group.record.call(described(layer)) as flow:
            outputs = call(inputs, *args, **options)
            flow.passes.append((inputs, outputs, _passed_on(layer, inputs)))
            return outputs

    replace_call(layer, noting)


def _passed_on(layer: Any, inputs: Any) -> Callable[[int], int | None]:
    """Return the mapping from input dims to output dims; None for contracted dims."""
    if not isinstance(layer, keras.layers.EinsumDense):
        return all_but_last(inputs)
    taken, output = layer.equation.replace(" ", "").split("->")
    term, kernel = taken.split(",")
    if "..." in term:
        return lambda dim: dim if dim == 1 and term.startswith("...") and output.startswith("...") else None
    activation_mixes = getattr(layer.activation, "__name__", "") in ("softmax", "log_softmax", "sparsemax")

    def place(dim: int) -> int | None:
        label = term[dim]
        if label in kernel or label not in output:
            return None
        where = output.index(label)
        return None if activation_mixes and where == len(output) - 1 else where

    return place


def is_experts(layer: Any) -> bool:
    """Return whether a layer is a mixture of experts with hvdtrain's `call`."""
    return calls_as(layer, MixtureOfExperts)


def note_experts(layer: Any, group: Group) -> None:
    """Make `layer` record sharded inputs and outputs.

    Full sequences are rejected: every rank would send the same tokens, which would count several times.
    """
    whole_call = layer.call

    def call(inputs: Any, *args: Any, **options: Any) -> Any:
        with group.record.call(described(layer)) as flow:
            outputs = whole_call(inputs, *args, **options)
            if group.cuts:
                place = POSITION_DIM - inputs.shape.rank
                flow.takes.append((inputs, place))
                flow.gives.append((outputs, place))
            return outputs

    replace_call(layer, call)


MASKS = ("query_mask", "value_mask", "key_mask")
HEAD_DIM = 2
"""Head dim of projections, [batch, positions, heads, features]."""


def is_attention(layer: Any) -> bool:
    """Return whether a layer has Keras' attention `call`; its attention function may be overridden."""
    return any(calls_as(layer, kind) for kind in KINDS)


def split_attention(layer: Any, group: Group, name: str) -> None:
    """Make a Keras attention layer see all positions; `name` is the same on all ranks.

    Raises ConfigError for heads not divisible by the ranks, or attention over other dims.
    """
    _check(layer, group.exchange.size)
    exchange = _Exchange(group, name)

    def attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        if not group.cuts:
            return whole_attention(query, key, value, *args, **options)
        outputs, scores = whole_attention(*exchange.heads(query, key, value), *args, **options)
        return exchange.own_positions(outputs), scores

    def attention_mask(query: Any, value: Any, *args: Any, **options: Any) -> Any:
        if not group.cuts:
            return whole_mask(query, value, *args, **options)
        masks = dict(zip(MASKS, args, strict=False)) | options
        masks |= {each: exchange.whole_mask(masks[each]) for each in MASKS if masks.get(each) is not None}
        return whole_mask(_of_length(query, group), _of_length(value, group), **masks)

    whole_attention, whole_mask = replace_attention(layer, attention=attention, mask=attention_mask)
    _note(layer, group)


def is_own_attention(layer: Any) -> bool:
    """Return whether a layer attends as `hvdtrain.DotProductAttention`."""
    return calls_as(layer, DotProductAttention)


def split_own_attention(layer: Any, group: Group, name: str) -> None:
    """Make a `DotProductAttention` see all positions; `name` is the same on all ranks."""
    whole_call, exchange, ranks = layer.call, _Exchange(group, name), group.exchange.size

    def call(query: Any, key: Any, value: Any, padding_mask: Any = None) -> Any:
        with group.record.call(described(layer)) as flow:
            if not group.cuts:
                return whole_call(query, key, value, padding_mask)
            fewest = min(query.shape[HEAD_DIM], key.shape[HEAD_DIM])
            if fewest % ranks:
                raise ConfigError(_undivided(layer, ranks, fewest))
            taken, mask = [query, key, value], padding_mask
            # A mask that is an input of the model has all positions; one of activations has those of a slice.
            if mask is not None and mask.shape[POSITION_DIM] == key.shape[POSITION_DIM]:
                taken.append(mask)
                mask = exchange.whole_mask(mask)
            outputs = exchange.own_positions(whole_call(*exchange.heads(query, key, value), mask))
            flow.takes += [(x, POSITION_DIM - x.shape.rank) for x in taken]
            flow.gives.append((outputs, POSITION_DIM - outputs.shape.rank))
            return outputs

    replace_call(layer, call)


def _undivided(layer: Any, ranks: int, heads: int) -> str:
    return (
        f"cp={ranks} does not divide the heads of {described(layer)}, of which each rank computes some. Received: "
        f"{heads} heads on a rank. Choose a cp that divides them, times tp where there is one."
    )


def _check(layer: Any, ranks: int) -> None:
    axes = attention_axes(layer) or (POSITION_DIM,)
    if axes != (POSITION_DIM,):
        raise ConfigError(
            f"{described(layer)} attends along the dims {axes}, and cp={ranks} cuts dim {POSITION_DIM} of "
            f"[batch, positions, features]: leave cp out of {opt('parallel')}, or attention_axes out of the layer."
        )
    heads = int(query_kernel(layer).shape[1])
    if heads % ranks:
        raise ConfigError(_undivided(layer, ranks, heads))


class _Exchange:
    """Collectives of one attention layer."""

    def __init__(self, group: Group, name: str) -> None:
        self._exchange = group.exchange
        self._name = name

    def heads(self, query: Any, key: Any, value: Any) -> Sequence[Any]:
        """Return all positions of this rank's heads; one message if all three have the same shape."""
        parts = (query, key, value)
        if query.shape[:3].as_list() != key.shape[:3].as_list():
            return [self._to_heads(part, role) for part, role in zip(parts, ("query", "key", "value"), strict=True)]
        together = self._to_heads(tf.concat(parts, -1), "query_key_value")
        return tf.split(together, [part.shape[-1] for part in parts], -1)

    def _to_heads(self, x: Any, role: str) -> Any:
        return exchange_parts(x, self._exchange, HEAD_DIM, POSITION_DIM, name=numbered(f"{self._name}/{role}"))

    def own_positions(self, x: Any) -> Any:
        """Return this rank's positions of all heads."""
        return exchange_parts(x, self._exchange, POSITION_DIM, HEAD_DIM, name=numbered(f"{self._name}/output"))

    def whole_mask(self, mask: Any) -> Any:
        """All-gather a mask along the positions."""
        numbers = gather_to(tf.cast(mask, tf.int32), self._exchange, POSITION_DIM, name=numbered(f"{self._name}/mask"))
        return tf.cast(numbers, tf.bool)


def _of_length(x: Any, group: Group) -> Any:
    """Return a placeholder of `x`'s full length: positional masks, such as causal ones, only use its shape."""
    known = x.shape[POSITION_DIM]
    own = tf.shape(x)[POSITION_DIM] if known is None else known
    return tf.zeros([1, own * group.exchange.size, 1])


def _note(layer: Any, group: Group) -> None:
    """Make an attention layer record its inputs and outputs."""
    whole_call = layer.call

    def call(query: Any, value: Any, key: Any = None, **options: Any) -> Any:
        if options.get("return_attention_scores"):
            raise ConfigError(
                f"{described(layer)} computes some heads on each rank along cp, and none has the scores of all: leave "
                f"out return_attention_scores=True, or cp in {opt('parallel')}."
            )
        with group.record.call(described(layer)) as flow:
            inputs = [x for x in (query, value, key) if x is not None]
            # Keras' attention takes the masks off its inputs.
            masks = [*(mask_of(x) for x in inputs), *(options.get(name) for name in MASKS)]
            outputs = whole_call(query, value, key, **options)
            if group.cuts:
                taken = [*inputs, *(mask for mask in masks if mask is not None)]
                flow.takes += [(x, POSITION_DIM - x.shape.rank) for x in taken]
                flow.gives.append((outputs, POSITION_DIM - outputs.shape.rank))
            return outputs

    replace_call(layer, call)
