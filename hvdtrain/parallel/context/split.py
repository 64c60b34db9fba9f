"""Shard a model's input sequences along `cp`; start here."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives, gather
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.compat.keras_attention import query_kernel
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.layers.exchanging import ExchangingLayer
from hvdtrain.parallel.context.flow import OWN_ATTENTION, follow
from hvdtrain.parallel.context.layers import (
    Group,
    cut_lookups,
    cut_output,
    is_attention,
    is_dense,
    is_embedding,
    is_experts,
    is_own_attention,
    note_dense,
    note_experts,
    split_attention,
    split_own_attention,
)
from hvdtrain.parallel.context.positions import POSITION_DIM, PositionSlices
from hvdtrain.parallel.tensor.flow.constants import UNSEEDED
from hvdtrain.parallel.tensor.flow.trace import Trace, input_specs, traced
from hvdtrain.parallel.tensor.layers.base import described
from hvdtrain.parallel.tensor.layers.sharded import inner_layers
from hvdtrain.parallel.tensor.rules import OUTPUT, Layout, LayoutRules
from hvdtrain.runtime.placement import draw_for_samples
from hvdtrain.state.structure import structure_of

AXIS = "cp"


def separated(rules: Any) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Partition layout rules into other axes and cp. Raises ConfigError for invalid cp rules."""
    if not isinstance(rules, Mapping | None):
        LayoutRules(rules)  # raises for invalid rules
    about = {expression: layout for expression, layout in (rules or {}).items() if _cuts_sequences(layout)}
    for expression, layout in about.items():
        if not expression.endswith(OUTPUT) or tuple(layout)[:2] != (None, AXIS) or any(tuple(layout)[2:]):
            raise ConfigError(
                "Along cp the output of a layer is cut, by its positions: "
                f'{{"LAYER/output": (None, "cp", None)}}. Received: {layout} for {expression!r}.'
            )
    return {expression: layout for expression, layout in (rules or {}).items() if expression not in about}, about


def _cuts_sequences(layout: Any) -> bool:
    return isinstance(layout, Sequence) and not isinstance(layout, str) and AXIS in layout


def named_layers(rules: Mapping[str, Layout], layers: Sequence[Any]) -> list[Any]:
    """Return the layers matched by rules. Raises ConfigError for a rule without a match."""
    found = []
    for expression in rules:
        matches = [layer for layer in layers if re.search(expression, f"{layer.path or layer.name}{OUTPUT}")]
        if not matches:
            names = ", ".join(layer.path or layer.name for layer in layers[:8])
            raise ConfigError(f"The rule {expression!r} matches no layer of the model, which has {names}.")
        found += matches
    return found


def agree_on_model(backend: Backend, model: Any, specs: Any) -> None:
    """Verify that all ranks split the same model. Collective over the whole job.

    Raises ConfigError, the same on every rank, naming a rank that differs, and how.
    """
    variables = structure_of(model).by_path(model.variables)
    mine = [f"{path} of the shape {tuple(variable.shape)}" for path, variable in variables.items()]
    mine += [f"inputs of the shape {tuple(spec.shape)}" for spec in tf.nest.flatten(specs)]
    first, *others = gather(backend, mine)
    for rank, other in enumerate(others, start=1):
        strange = [fact for fact in (*other, *first) if (fact in other) != (fact in first)]
        if strange:
            where = f"rank {rank}, and not on rank 0" if strange[0] in other else f"rank 0, and not on rank {rank}"
            raise ConfigError(
                f"Every rank along cp computes positions of the same model. Received: {strange[0]} on {where}. Build "
                "it alike everywhere."
            )


def split_sequences(model: Any, exchange: Collectives, rules: Mapping[str, Layout], inputs: Any = None) -> None:
    """Make `model` compute only this rank's positions of full input sequences.

    Args:
        model: a built Keras model, changed in place; its layers may be sharded along `tp`.
        exchange: the ranks along `cp`, which have the same samples.
        rules: layers, besides embeddings, after which sequences are sharded.
        inputs: for a model class of the user's own: a batch, or anything with its shapes.

    Raises:
        ConfigError: sizes that do not divide, or a layer that looks at several positions; it is named.
    """
    specs = input_specs(model, inputs)
    group = Group(exchange)
    first = _length_of(model, specs, exchange.size)
    group.lengths = frozenset([first, *_other_lengths(specs, exchange.size)])
    _install(model, group, rules)
    try:
        draws = _draws(model, specs, group)
    except ConfigError:
        if group.lengths == {first}:
            raise
        # Numbers of each sample, such as the columns of a table, are no sequence.
        group.cuts, group.lengths = False, frozenset([first])
        draws = _draws(model, specs, group)
    for variable in draws:
        draw_for_samples(variable)
    PositionSlices(exchange, group.whole_sequences).install(model)
    model.split_along = (*getattr(model, "split_along", ()), AXIS)


def _draws(model: Any, specs: Any, group: Group) -> list[Any]:
    """Compare the model on slices with the whole one; return states of generators that draw for all positions."""
    wholes = {mode: _traced(model, specs, group, training=mode) for mode in (True, False)}
    group.cuts = True
    variables = structure_of(model).by_path(model.variables)
    paths: set[str] = set()
    for mode, whole in wholes.items():
        sliced = _traced(model, specs, group, training=mode)
        paths |= follow(sliced, whole, group.exchange.size, variables).replicated
    return [variables[path] for path in sorted(paths - {UNSEEDED})]


def _install(model: Any, group: Group, rules: Mapping[str, Layout]) -> None:
    layers = _layers(model)
    projections = {id(inner) for layer in layers if is_attention(layer) for inner in inner_layers(layer)}
    for number, layer in enumerate(layers):
        _refuse_unfit(layer)
        if is_attention(layer):
            split_attention(layer, group, f"context/{_name_of(model, layer)}")
        elif is_own_attention(layer):
            split_own_attention(layer, group, f"context/attention_{number}")
        elif is_embedding(layer):
            cut_lookups(layer, group)
        elif is_dense(layer) and id(layer) not in projections:
            note_dense(layer, group)
        elif is_experts(layer):
            note_experts(layer, group)
    for layer in named_layers(rules, layers):
        cut_output(layer, group)


def _layers(model: Any) -> list[Any]:
    """Return every layer of `model` once."""
    layers = flatten_layers(model, include_self=False)
    return list({id(layer): layer for layer in layers if isinstance(layer, keras.Layer)}.values())


def _name_of(model: Any, layer: Any) -> str:
    """Return an attention layer's structural path, the same in every process."""
    path = structure_of(model).path(query_kernel(layer))
    return path.rpartition("/")[0].rpartition("/")[0] or str(layer.name)


def _length_of(model: Any, specs: Any, ranks: int) -> int:
    """Return the length of a model's input sequences. Raises ConfigError if unknown or not divisible."""
    first = next((spec for spec in tf.nest.flatten(specs) if len(spec.shape) > POSITION_DIM), None)
    if first is None:
        raise ConfigError(
            f"cp={ranks} cuts sequences, inputs [batch, positions, …], and {model.name!r} has none. Leave cp out of "
            f"{opt('parallel')}."
        )
    length = first.shape[POSITION_DIM]
    if length is None:
        raise ConfigError(
            f"cp={ranks} cuts sequences of a known length, and {model.name!r} takes any: give keras.Input the length, "
            "or parallelize the shapes of a batch, inputs=x[:1]."
        )
    if length % ranks:
        raise ConfigError(
            f"cp={ranks} does not divide the length of the sequences that {model.name!r} takes. Received: {length} "
            "positions. Choose a cp that divides it, or another length."
        )
    return int(length)


def _other_lengths(specs: Any, ranks: int) -> list[int]:
    """Return the lengths of further inputs of tokens, such as a decoder's, that the ranks divide."""
    tokens = [spec for spec in tf.nest.flatten(specs) if spec.dtype.is_integer and len(spec.shape) == POSITION_DIM + 1]
    lengths = [spec.shape[POSITION_DIM] for spec in tokens]
    return [length for length in lengths if length is not None and length % ranks == 0]


def _traced(model: Any, specs: Any, group: Group, *, training: bool) -> Trace:
    try:
        trace = traced(model, specs, group.record, training=training)
    except ConfigError:
        raise
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise ConfigError(
            f"{model.name!r} cannot be called with slices of its sequences: one meets a tensor of all positions. What "
            'belongs to positions comes of an Embedding, or of a layer that a rule names, as in {"LAYER/output": '
            f'(None, "cp", None)}}. {OWN_ATTENTION} TensorFlow says: {error}'
        ) from error
    other = next((layer for layer, _ in trace.losses if not is_experts(layer)), None)
    if other is not None:
        raise ConfigError(
            f"{described(other)} adds a loss, which would be that of a slice of each sequence: leave it out, or cp in "
            f"{opt('parallel')}."
        )
    return trace


def _refuse_unfit(layer: Any) -> None:
    """Reject a layer that needs all tokens: sharded tables, overridden experts, activity regularizers."""
    if isinstance(layer, ExchangingLayer) and not is_experts(layer):
        raise ConfigError(
            f"{described(layer)} counts the tokens of whole samples for their way to other ranks, and along cp a rank "
            f"has slices of samples: leave the layer out, or cp in {opt('parallel')}."
        )
    if getattr(layer, "activity_regularizer", None) is not None:
        raise ConfigError(
            f"The activity regularizer of {described(layer)} would look at a slice of each sequence: leave it out, or "
            f"cp in {opt('parallel')}."
        )
