"""Partition a model into stages of equal cost, or at specified layers."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import keras

from hvdtrain.compat.keras import flatten_layers, own_variables
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.registry import suggestion
from hvdtrain.layers.experts import MixtureOfExperts
from hvdtrain.parallel.context.positions import PositionSlices
from hvdtrain.parallel.pipeline.graph import (
    Graph,
    graph_of,
    is_float,
    masks_at,
    shapes_here,
    sliced_tensors,
    symbols_of,
    variables_of,
)
from hvdtrain.state.named_tensors import placed_tensor
from hvdtrain.state.structure import seed_states, structure_of
from hvdtrain.state.variables import unwrap


def flops(node: Any) -> float:
    """Estimate the floating-point operations of one forward call per sample.

    A matrix product, convolution etc. takes two per kernel element and output position; attention takes an additional 4
    x queries x keys x width; embeddings and other operations one per output element. Only a token's top-k experts
    count. Layers sharded along tp count in full, so that all ranks, whose shards may differ by one, cut at the same
    layers. Unknown dims, such as a variable sequence length, count as 1.
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
    """Return the size of a layer's own kernels that multiply each position."""
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


@dataclass(frozen=True)
class SequenceSlices:
    """Tensors of a model's graph that are sharded along the sequence."""

    ranks: int = 1
    dims: Mapping[int, int] = field(default_factory=dict)
    """The sharded dim, by the id of the symbolic (full) tensor."""

    def shape_here(self, symbol: Any, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Return the local shape of the tensor `symbol` of the full `shape`."""
        cut = self.dims.get(id(symbol))
        return tuple(size // self.ranks if dim == cut and size is not None else size for dim, size in enumerate(shape))


def whole_sequences(model: Any) -> AbstractContextManager[None]:
    """Return a context in which `model` computes all positions, despite cp."""
    slices = PositionSlices.of(model)
    return nullcontext() if slices is None else slices.whole()


def sequence_slices(model: Any, graph: Graph) -> SequenceSlices:
    """Return a graph's tensors sharded along cp. Raises ConfigError for variable-length inputs."""
    slices = PositionSlices.of(model)
    if slices is None:
        return SequenceSlices()
    with slices.whole():
        whole = shapes_here(graph)
    dims = {}
    for symbol, mine, theirs in zip(symbols_of(graph), shapes_here(graph), whole, strict=True):
        pairs = enumerate(zip(mine.as_list(), theirs.as_list(), strict=True))
        cut = next((dim for dim, (here, everywhere) in pairs if here != everywhere), None)
        if cut is not None:
            dims[id(symbol)] = cut
    if any(id(output) not in dims for output in graph.outputs):
        raise ConfigError(
            f"Stages along pp exchange slices of sequences along cp={slices.ranks}, whose length must be known. "
            f"Received: inputs of {model.name!r} of any length. Give keras.Input the length."
        )
    return SequenceSlices(slices.ranks, dims)


@dataclass(frozen=True)
class Cut:
    """A model's graph, partitioned into stages."""

    graph: Graph
    bounds: tuple[int, ...]
    """Stage s calls nodes bounds[s] to bounds[s + 1]."""
    costs: tuple[float, ...]
    """Estimated operations of each node, computed from the full model."""
    slices: SequenceSlices = field(default_factory=SequenceSlices)
    """Tensors between stages that are sharded along cp."""
    masks: tuple[frozenset[int], ...] = ()
    """Ids of the symbolic tensors with a mask at the end of each stage."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def nodes(self, stage: int) -> tuple[Any, ...]:
        """Return the calls of a stage."""
        return self.graph.nodes[self.bounds[stage] : self.bounds[stage + 1]]

    def incoming(self, stage: int) -> list[Any]:
        """Return the symbolic tensors a stage receives; none for the first."""
        return self.graph.crossing(self.bounds[stage]) if stage else []

    def outgoing(self, stage: int) -> list[Any]:
        """Return the symbolic tensors a stage sends; for the last, the model's outputs."""
        return self.graph.crossing(self.bounds[stage + 1]) if stage + 1 < self.stages else list(self.graph.outputs)

    def masked(self, stage: int) -> list[Any]:
        """Return the outgoing tensors that have a mask."""
        return [tensor for tensor in self.outgoing(stage) if id(tensor) in self.masks[stage]]

    def cost(self, stage: int) -> float:
        """Return a stage's estimated forward operations per sample."""
        return sum(self.costs[self.bounds[stage] : self.bounds[stage + 1]])

    def first_names(self) -> list[str]:
        """Return the name of the first layer or operation of each stage."""
        return [self.nodes(stage)[0].operation.name for stage in range(self.stages)]


def cut_model(model: Any, stages: int, first_layers: Sequence[str] = (), *, split: bool = False) -> Cut:
    """Partition `model` into consecutive stages with trainable variables each.

    Args:
        model: a built Functional or Sequential model.
        first_layers: names of the first layer of the second stage, the third …; by default the largest estimated cost
            of a stage is minimized, among cuts with a single crossing tensor.
        split: whether layers are sharded along tp: stages exchange full tensors only.

    Raises:
        ConfigError: another kind of model, one without such cuts, or names that do not fit.
    """
    graph = graph_of(model)
    costs = tuple(map(flops, graph.nodes))
    with whole_sequences(model):
        sliced = sliced_tensors(graph) if split else set()
    slices = sequence_slices(model, graph)
    if first_layers:
        bounds = tuple(_named_bounds(model, graph, stages, first_layers))
    else:
        bounds = tuple(_equal_bounds(model, graph=graph, costs=costs, stages=stages, sliced=sliced))
    cut = Cut(graph=graph, bounds=bounds, costs=costs, slices=slices, masks=masks_at(graph, bounds[1:]))
    if first_layers:
        _refuse_slices(cut, sliced)
    return cut


def _refuse_slices(cut: Cut, sliced: AbstractSet[int]) -> None:
    for stage in range(1, cut.stages):
        tensor = next((tensor for tensor in cut.incoming(stage) if id(tensor) in sliced), None)
        if tensor is not None:
            raise ConfigError(
                f"Stages exchange whole tensors, and {opt('pipeline_stages')} names a layer that takes a slice on each "
                "rank "
                f"along tp. Received: {cut.first_names()[stage]}, which takes {tensor.name!r}. Name a layer before or "
                f"behind it, and leave out {opt('sequence_parallel')}."
            )


def _equal_bounds(model: Any, graph: Graph, costs: Sequence[float], stages: int, sliced: AbstractSet[int]) -> list[int]:
    everywhere = [
        place
        for place in range(1, len(graph.nodes))
        if any(map(is_float, graph.crossing(place))) and sliced.isdisjoint(map(id, graph.crossing(place)))
    ]
    narrow = [place for place in everywhere if len(graph.crossing(place)) == 1]
    refused = _between_calls_with_state(model, graph)
    kept = [[place for place in places if place not in refused] for places in (narrow, everywhere)]
    for places in (*kept, narrow, everywhere):
        bounds = _smallest_largest(graph, costs, [0, *places, len(graph.nodes)], stages)
        if bounds is not None:
            return bounds
    trained = sum(bool(_trained([node])) for node in graph.nodes)
    if sliced and _smallest_largest(graph, costs, list(range(len(graph.nodes) + 1)), stages) is not None:
        raise ConfigError(
            f"{type(model).__name__} {model.name!r} is split along tp so that it cannot be cut into {stages} stages: "
            f"they exchange whole tensors. Use fewer ranks along pp, and leave out {opt('sequence_parallel')}."
        )
    raise ConfigError(
        f"{type(model).__name__} {model.name!r} cannot be cut into {stages} stages that each have weights to train. "
        f"Received: {trained} layer{'s' if trained != 1 else ''} with such weights. Use fewer ranks along pp, or fewer "
        f"{opt('virtual_stages')}.{_advice_on_nested(graph)}"
    )


def _advice_on_nested(graph: Graph) -> str:
    """Return advice on how to divide a nested model into stages."""
    models = [node.operation for node in graph.nodes if isinstance(node.operation, keras.Model)]
    trained = [model for model in models if sum(bool(layer.trainable_weights) for layer in model.layers) > 1]
    if not trained:
        return ""
    name = trained[0].name
    return (
        f" Or put the layers of the model {name!r}, which is called as one layer, into the model itself: begin with "
        f"its outputs, as in keras.Model({name}.inputs, head({name}.outputs[0]))."
    )


def _between_calls_with_state(model: Any, graph: Graph) -> set[int]:
    """Return the places between calls of a stateful layer, such as dropout."""
    changing = changing_variables(model)
    calls: dict[int, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        for variable in variables_of([node]):
            if id(unwrap(variable)) in changing:
                calls.setdefault(id(unwrap(variable)), []).append(number)
    return {place for numbers in calls.values() for place in range(numbers[0] + 1, numbers[-1] + 1)}


def changing_variables(model: Any) -> set[int]:
    """Return the ids of variables updated in the forward pass: statistics and generator states."""
    return {*structure_of(model).statistics, *(id(unwrap(state)) for state in seed_states(model))}


def _smallest_largest(
    graph: Graph, node_costs: Sequence[float], places: Sequence[int], stages: int
) -> list[int] | None:
    """Return bounds among `places` that minimize the largest stage cost; None if there are too few.

    Dynamic programming: best[k][j] is the minimal largest cost of k stages that end at places[j].
    """
    costs = [0.0, *accumulate(node_costs)]
    has_weights = [0, *accumulate(int(bool(_trained([node]))) for node in graph.nodes)]
    best: list[tuple[float, list[int]] | None] = [(0.0, [0]), *[None] * (len(places) - 1)]
    for _ in range(stages):
        after: list[tuple[float, list[int]] | None] = [None] * len(places)
        for end in range(1, len(places)):
            for begin in range(end):
                before, first, last = best[begin], places[begin], places[end]
                if before is None or has_weights[last] == has_weights[first]:
                    continue
                largest = max(before[0], costs[last] - costs[first])
                known = after[end]
                if known is None or largest < known[0]:
                    after[end] = (largest, [*before[1], last])
        best = after
    return None if best[-1] is None else best[-1][1]


def _named_bounds(model: Any, graph: Graph, stages: int, names: Sequence[str]) -> list[int]:
    if len(names) != stages - 1:
        raise ConfigError(
            f"{opt('pipeline_stages')} names the first layer of each stage but the first: {stages - 1} for {stages} "
            "stages. "
            f"Received: {', '.join(names)}."
        )
    bounds = [0, *(_place(model, graph, name) for name in names), len(graph.nodes)]
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        if begin >= end:
            raise ConfigError(
                f"{opt('pipeline_stages')} names layers in the order in which the model calls them, and not its first. "
                f"Received: {', '.join(names)}."
            )
        if not _trained(graph.nodes[begin:end]):
            raise ConfigError(
                f"Stage {stage} of {opt('pipeline_stages')} has no weights to train. Received: {', '.join(names)}. "
                "Name "
                "layers that are farther apart."
            )
    return bounds


def _place(model: Any, graph: Graph, name: str) -> int:
    names = [node.operation.name for node in graph.nodes]
    if name not in names:
        raise ConfigError(
            f"{type(model).__name__} {model.name!r} calls no layer {name!r}, which {opt('pipeline_stages')} names."
            f"{suggestion(name, dict.fromkeys(names, ''))}"
        )
    return names.index(name)


def _trained(nodes: Sequence[Any]) -> list[Any]:
    return [variable for variable in variables_of(nodes) if variable.trainable]


def shared_variables(cut: Cut) -> dict[int, list[int]]:
    """Return the stages that share each tied variable, by its id."""
    users: dict[int, list[int]] = {}
    for stage in range(cut.stages):
        for variable in variables_of(cut.nodes(stage)):
            users.setdefault(id(variable), []).append(stage)
    return {key: stages for key, stages in users.items() if len(stages) > 1}
