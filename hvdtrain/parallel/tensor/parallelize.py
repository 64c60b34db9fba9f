"""Shard a model's layers along `tp`; start here.

`parallel/parallelize.py` is the public entry.
"""

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.differentiable import sum_from
from hvdtrain.backends.protocol import Backend, Collectives
from hvdtrain.compat.keras import flatten_layers, own_seed_generators
from hvdtrain.compat.keras_variables import replace_regularizer
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.parallel.tensor.building import Building, ShardedVariable, agree_on_shards, shard_in_place
from hvdtrain.parallel.tensor.cuts import Cut
from hvdtrain.parallel.tensor.flow.check import SIZES, Flow, follow
from hvdtrain.parallel.tensor.flow.trace import FlowRecord, Trace, built, input_specs, of_one_size, traced
from hvdtrain.parallel.tensor.layers.base import (
    Group,
    TensorParallelLayer,
    count_own_heads,
    cut_output,
    described,
    recorded,
)
from hvdtrain.parallel.tensor.layers.sharded import tensor_parallel_layers
from hvdtrain.parallel.tensor.outputs import OutputShards
from hvdtrain.parallel.tensor.rules import AXIS, LayoutRules, Rules
from hvdtrain.runtime.compiled import numbered
from hvdtrain.runtime.placement import Placement, draw_apart, place, placement_of, whole_box
from hvdtrain.state.initial_values import materialize
from hvdtrain.state.structure import structure_of
from hvdtrain.state.variables import unwrap

WRITES = ("save", "save_weights", "export")


def refuse_saving_shards(model: Any) -> None:
    """Make a model's save methods raise: a file of one rank's shards could not be loaded."""
    for method in WRITES:
        vars(model)[method] = _refusal(method)


def _refusal(method: str) -> Any:
    def refuse(*args: Any, **options: Any) -> None:
        raise ConfigError(
            f"model.{method}() would write the slices of one rank, and the model is split among several: write "
            "checkpoints by Trainer.save, fit(checkpoint=…) or --checkpoint-every, and a whole file from one of them "
            "by python -m hvdtrain checkpoint export."
        )

    return refuse


ADDITIVE = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
"""Regularizers that are sums over elements, and so over shards."""


def regularize_shards(variable: Any, exchange: Collectives, name: str) -> None:
    """Make a shard's penalty that of the full variable. Raises ConfigError unless it is a sum over elements."""
    whole = variable.regularizer
    if whole is None:
        return
    if type(whole) not in ADDITIVE:
        raise ConfigError(
            f"The regularizer of {variable.path!r} looks at the whole variable, of which each rank has a slice; L1, L2 "
            f"and L1L2 are sums over shards. Received: {type(whole).__name__}. Leave it out, or the variable whole."
        )
    replace_regularizer(
        variable, lambda value: sum_from(whole(value), exchange, name=numbered(f"tensor/{name}/penalty"))
    )


def divide_penalty(variable: Any, ranks: int) -> None:
    """Scale the gradient of a full variable's penalty for summation over ranks; its value is unchanged."""
    whole = variable.regularizer
    if whole is None:
        return

    def penalty(value: Any) -> Any:
        found = whole(value)
        return keras.ops.stop_gradient(found) * (1 - 1 / ranks) + found / ranks

    replace_regularizer(variable, penalty)


class Parallelization:
    """Shards a model's layers along `tp`; implements `hvdtrain.parallelize`.

    `backend` agrees with the other ranks; None: skip.
    """

    def __init__(
        self,
        exchange: Collectives,
        rules: Rules,
        backend: Backend | None,
        *,
        sequence: bool = False,
        of_many: bool = False,
    ) -> None:
        self._exchange = exchange
        self._rules = LayoutRules(rules, of_many=of_many)
        self._backend = backend
        self._group = Group(exchange, sequence, FlowRecord())

    def __call__(self, model: Any, inputs: Any) -> keras.Model:
        """Build the model if necessary, shard it, and return it."""
        building = Building(self._rules, self._exchange.index, self._exchange.size)
        if isinstance(model, keras.Model):
            split = built(model, inputs)
        else:
            with building.scope() if self._exchange.size > 1 else tf.name_scope(""):
                split = built(model, inputs)
        check_model(split)
        self._split(split, building, inputs)
        return split

    def _split(self, model: Any, building: Building, inputs: Any) -> None:
        cuts = self._cuts(model, building)
        outputs = self._output_layers(model)
        self._rules.check_used([variable.path for variable in model.trainable_variables])
        if self._exchange.size == 1:
            return
        if not cuts:
            raise ConfigError(
                f"No rule cuts a variable of {model.name!r}, and tp={self._exchange.size} ranks would do the same "
                f"work. Leave tp out of {opt('parallel')}, or write a layout with 'tp'."
            )
        layers = tensor_parallel_layers(model, cuts)
        self._follow_kernels(layers, cuts)
        specs = of_one_size(input_specs(model, inputs))
        with recorded([layer for layer, _ in layers], [layer for layer, _ in outputs], self._group.record):
            wholes = {mode: traced(model, specs, self._group.record, training=mode) for mode in (True, False)}
        # A builder may make layers that the model does not use.
        made = [each for each in building.finish() if id(each.variable) in cuts]
        paths = self._cut(model, made, cuts)
        for layer, sliced in layers:
            sliced.install(self._group, f"tensor/{_name_of(layer, paths, cuts)}")
        count_own_heads(model, cuts, self._exchange.size)
        for layer, cut in outputs:
            cut_output(layer, self._group, f"tensor/output/{layer.path or layer.name}", whole=not cut)
        cut_paths = frozenset(paths[key] for key in cuts)
        flow, in_inference = (self._followed(model, specs, wholes[mode], cut_paths, training=mode) for mode in wholes)
        dims = [[layout.dim for layout in each.outputs] for each in (flow, in_inference)]
        if dims[0] != dims[1] and any(dim is not None for dim in (*dims[0], *dims[1])):
            raise ConfigError(
                f"{model.name!r} gives slices of its outputs in training or in inference alone: let it give the same "
                "ones in both, or leave its last layer whole."
            )
        if self._group.sequence:
            flow.partial |= {paths[id(variable)] for _, sliced in layers for variable in sliced.shared()}
        _record_layouts(model, flow=flow, whole=wholes[True], layers=layers, exchange=self._exchange)
        refuse_saving_shards(model)

    def _output_layers(self, model: Any) -> list[tuple[Any, bool]]:
        """Return layers with an output rule, and whether it shards the sequence."""
        found = []
        for layer in flatten_layers(model, include_self=False):
            cut = self._rules.output_of(layer.path or layer.name)
            if cut is not None:
                found.append((layer, cut))
        if self._group.sequence and not any(cut for _, cut in found) and self._exchange.size > 1:
            raise ConfigError(
                f"{opt('sequence_parallel')} needs a rule for where the sequence is cut first, such as "
                '{"embeddings/output": (None, "tp", None)} for a layer of that name.'
            )
        if not self._group.sequence:
            return []
        return found

    def _cuts(self, model: Any, building: Building) -> dict[int, Cut]:
        """Return the cuts of variables that match the rules, by id."""
        cuts = {}
        for variable in model.variables:
            if id(variable) in building.made:
                cuts[id(variable)] = building.made[id(variable)].cut
                continue
            cut = self._rules.cut_of(variable.path, variable.shape, self._exchange.index, self._exchange.size)
            if cut is None:
                continue
            if placement_of(variable) is not None:
                raise ConfigError(f"The variable {variable.path!r} of {model.name!r} is split among the ranks already.")
            cuts[id(variable)] = cut
        return cuts

    @staticmethod
    def _follow_kernels(layers: Sequence[tuple[Any, TensorParallelLayer]], cuts: dict[int, Cut]) -> None:
        """Shard biases like their kernels."""
        for _, sliced in layers:
            for key, (variable, cut) in sliced.dependent_cuts().items():
                if cuts.setdefault(key, cut) != cut:
                    raise ConfigError(
                        f"The bias {variable.path!r} is cut like the output of its kernel, {cut.description}. "
                        f"Received: a rule that cuts it {cuts[key].description}. Leave that rule out."
                    )

    def _cut(self, model: Any, made: Sequence[ShardedVariable], cuts: dict[int, Cut]) -> dict[int, str]:
        """Shard the variables, consistently on all ranks; return the paths of all variables by id."""
        paths = {id(variable): structure_of(model).path(variable) for variable in model.variables}
        before = {id(each.variable) for each in made}
        others = [variable for variable in model.variables if id(variable) in cuts and id(variable) not in before]
        materialize(others)
        if self._backend is not None:
            agree_on_shards(self._backend, made, others, paths)
        for variable in others:
            shard_in_place(variable, cuts[id(variable)])
        for variable in model.variables:
            cut = cuts.get(id(variable))
            if cut is not None:
                place(variable, Placement(cut.whole, cut.region, axes=(AXIS,)))
                regularize_shards(variable, self._exchange, paths[id(variable)])
        return paths

    def _followed(self, model: Any, specs: Any, whole: Trace, cut: frozenset[str], *, training: bool) -> Flow:
        try:
            sliced = traced(model, specs, self._group.record, training=training)
        except ConfigError:
            raise
        except (ValueError, TypeError, tf.errors.OpError) as error:
            found = _of_receiver(error) or (
                "an activation of which each rank has a slice arrives where the whole is needed. "
                f"{_elsewhere(model)}What was raised: {_cause(error)}"
            )
            raise ConfigError(f"{model.name!r} cannot be called with slices of its variables: {found}") from error
        variables = structure_of(model).by_path(model.variables)
        return follow(
            sliced, whole=whole, ranks=self._exchange.size, index=self._exchange.index, variables=variables, cut=cut
        )


NORMALIZATIONS = (keras.layers.BatchNormalization, keras.layers.LayerNormalization, keras.layers.GroupNormalization)


def _of_receiver(error: Exception) -> str:
    """Return what is wrong at the layer that refuses its input by an error of Keras; empty if it is another error."""
    match = re.search(r"""of layer ['"]([^'"]+)['"] is incompatible""", str(error))
    if match is None:
        return ""
    name = match[1]
    sizes = re.search(r"to have value (\d+).*received input with shape \([^)]*?(\d+)\)", str(error), re.DOTALL)
    if sizes is not None and int(sizes[1]) < int(sizes[2]):
        return (
            f"the whole of an activation arrives at {name!r}, which takes a slice of it, by '{name}/kernel': "
            "('tp', None). Cut the layer before it along its output, by (None, 'tp'), or, "
            f"where that is the input, cut {name!r} along its output in place of its input."
        )
    return (
        f"an activation of which each rank has a slice arrives where the whole is needed, at {name!r}: cut that along "
        f"its input, by '{name}/kernel': ('tp', None), or leave the layer before it whole."
    )


def _cause(error: Exception) -> str:
    """Return an exception's own words, without the call and its arguments that Keras adds around bold text."""
    own = re.search(r"\x1b\[1m(.*)\x1b\[0m", str(error), re.DOTALL)
    return own[1] if own else str(error)


def _elsewhere(model: Any) -> str:
    """Return advice where the layer is not known, also about layers that have numbers for all features."""
    advice = f"{SIZES}; or cut a layer before that along its input. "
    found = [layer for layer in flatten_layers(model) if isinstance(layer, NORMALIZATIONS)]
    if not found:
        return advice
    return (
        f"{advice}{described(found[0])} has a scale for each of all features: a Dense layer or convolution whose "
        "output it normalizes stays whole. "
    )


def check_model(model: Any) -> None:
    """Reject anything but a built, untrained Keras model. Raises ConfigError with the reason."""
    if not isinstance(model, keras.Model):
        raise ConfigError(f"A Keras model, or a function that builds one, is needed. Received: {model!r}.")
    if not model.built or not model.variables:
        raise ConfigError(
            f"{type(model).__name__} {model.name!r} has no variables before it is called: give parallelize the "
            "shapes of a batch too, inputs=x[:1], or call the model on one in the function that builds it."
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        raise ConfigError(
            f"The optimizer of {model.name!r} was built for whole variables: parallelize the model before it is "
            "trained, and give Trainer a new optimizer."
        )


def _record_layouts(
    model: Any, flow: Flow, whole: Trace, layers: Sequence[tuple[Any, TensorParallelLayer]], exchange: Collectives
) -> None:
    """Record partial gradients, per-rank random generators and sharded outputs."""
    structure = structure_of(model)
    variables = structure.by_path(model.variables)
    owners = {structure.path(variable): variable for variable in model.variables}
    for path in sorted(flow.partial):
        shape = tuple(variables[path].shape)
        place(variables[path], Placement(shape, whole_box(shape), summed_over=(AXIS,)))
        divide_penalty(owners[path], exchange.size)
    inside = [generator for layer, _ in layers for generator in _generators(layer)]
    for variable in [*(variables[path] for path in sorted(flow.generators.sharded)), *inside]:
        draw_apart(variable, exchange.index)
    lengths = [
        None if layout.dim is None else int(tensor.shape[-1])
        for layout, tensor in zip(flow.outputs, whole.outputs, strict=True)
    ]
    if any(length is not None for length in lengths):
        OutputShards(exchange, lengths).install(model)


def _generators(layer: Any) -> list[Any]:
    """Return the generator states inside a sharded layer, such as attention dropout."""
    inner = [generator for each in flatten_layers(layer) for generator in own_seed_generators(each)]
    return [unwrap(generator.state) for generator in inner]


def _name_of(layer: Any, paths: dict[int, str], cuts: dict[int, Cut]) -> str:
    """Return a layer's structural path, the same in every process."""
    held = [variable for variable in layer.variables if id(variable) in cuts]
    path = paths[id(held[0])].rpartition("/")[0]
    return path or layer.name
