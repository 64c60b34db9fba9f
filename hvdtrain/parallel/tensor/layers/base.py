"""Base of sharded layers: their group of ranks, and the record of inputs and outputs."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import tensorflow as tf

from hvdtrain.backends.differentiable import copy_to, gather_from, gather_to, slice_to, sum_from, sum_slices_from
from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras import flatten_layers, mask_of, own_layers
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.parallel.tensor.cuts import Cut
from hvdtrain.parallel.tensor.flow.trace import BY_OUTPUT_RULE, FlowRecord, LayerCall, shown
from hvdtrain.runtime.compiled import numbered

COUNTS_OF_HEADS = ("num_heads", "num_query_heads", "num_key_value_heads")
"""Attributes by which layers reshape activations to heads."""
SEQUENCE_DIM = 1
"""Sequence dim of activations, [batch, sequence, …], used by sequence parallelism."""


@dataclass
class Group:
    """The tensor-parallel group, and the layout of activations between layers."""

    exchange: Collectives
    sequence: bool
    """Whether activations between blocks are sharded along the sequence."""
    record: FlowRecord
    """Where layers record inputs and outputs while the model is checked."""

    def gather_input(self, x: Any, name: str, flow: LayerCall) -> Any:
        """Return an activation in full, for rank-specific use."""
        if not self.sequence:
            return copy_to(x, self.exchange, name=numbered(f"{name}/input"))
        flow.takes.append((x, self._sequence_dim(x, name)))
        return gather_to(x, self.exchange, SEQUENCE_DIM, name=numbered(f"{name}/input"))

    def reduce_output(self, x: Any, name: str) -> Any:
        """Reduce the ranks' partial results to the layout between blocks."""
        if not self.sequence:
            return self.all_reduce(x, name)
        self._sequence_dim(x, name)
        return sum_slices_from(x, self.exchange, SEQUENCE_DIM, name=numbered(f"{name}/output"))

    def record_output(self, outputs: Any, flow: LayerCall) -> Any:
        """Record the layout of a layer's output, and return it."""
        if self.sequence:
            flow.gives.append((outputs, SEQUENCE_DIM - outputs.shape.rank))
        return outputs

    def all_reduce(self, x: Any, name: str) -> Any:
        """All-reduce the ranks' partial results."""
        return sum_from(x, self.exchange, name=numbered(f"{name}/output"))

    def _sequence_dim(self, x: Any, name: str) -> int:
        """Return the sequence dim, counted from the last."""
        if x.shape.rank is None or x.shape.rank < 3 or mask_of(x) is not None:
            raise ConfigError(
                f"{opt('sequence_parallel')} cuts activations of the shape [batch, sequence, features], without a "
                "mask. "
                f"Received: {x.shape} at {name!r}. Leave the option out."
            )
        return SEQUENCE_DIM - int(x.shape.rank)


_NOT_IN_CALLS = frozenset(
    (
        *("build", "quantized_build", "get_config", "from_config", "get_build_config", "build_from_config"),
        *("compute_output_shape", "compute_output_spec", "compute_mask", "save_own_variables", "load_own_variables"),
        *("enable_lora", "quantize", "variable_serialization_spec"),
    )
)
"""Methods that subclasses of Keras layers may override: not part of the computation, or called around it."""


class TensorParallelLayer(Protocol):
    """A layer with sharded variables."""

    def dependent_cuts(self) -> dict[int, tuple[Any, Cut]]:
        """Return by id the cuts of variables sharded along with named ones."""

    def shared(self) -> list[Any]:
        """Return full variables applied to each rank's shard of the sequence."""

    def install(self, group: Group, name: str) -> None:
        """Replace the layer's call; `name` is the same on all ranks."""


def cut_of(variable: Any, cuts: dict[int, Cut]) -> Cut | None:
    """Return the cut of `variable`, or None."""
    return None if variable is None else cuts.get(id(variable))


def calls_as(layer: Any, kind: type) -> bool:
    """Return whether a layer inherits the `call` of a Keras class."""
    return isinstance(layer, kind) and type(layer).call is kind.call  # type: ignore[attr-defined]


def computes_as(layer: Any, kind: type) -> bool:
    """Return whether a layer overrides nothing that a Keras class' `call` uses."""
    if not isinstance(layer, kind):
        return False
    classes = type(layer).__mro__
    own = [item for each in classes[: classes.index(kind)] for item in vars(each).items()]
    overridden = {name for name, value in own if callable(value) or isinstance(value, property)}
    return not any(hasattr(kind, name) and not name.startswith("__") for name in overridden - _NOT_IN_CALLS)


def described(layer: Any) -> str:
    """Return a layer's kind and name, for messages."""
    return f"{type(layer).__name__} {(layer.path or layer.name)!r}"


def replace_call(layer: Any, call: Callable[..., Any]) -> None:
    """Set the `call` of `layer`."""
    vars(layer)["call"] = call


def count_own_heads(model: Any, cuts: dict[int, Cut], ranks: int) -> None:
    """Let a layer that counts the heads of its projections, as KerasHub's Gemma does, count those of its rank.

    Only while it is called: it is built and described as a whole.
    """
    for layer in flatten_layers(model):
        heads = [
            cut.whole[cut.dim]
            for inner in own_layers(layer)
            for cut in [cut_of(getattr(inner, "kernel", None), cuts)]
            if cut is not None and inner.name in ("query", "key", "value")
        ]
        own = {name: vars(layer)[name] for name in COUNTS_OF_HEADS if vars(layer).get(name) in heads}
        if own:
            replace_call(layer, _counting(layer, layer.call, {name: count // ranks for name, count in own.items()}))


def _counting(layer: Any, whole_call: Callable[..., Any], counts: dict[str, int]) -> Callable[..., Any]:
    @functools.wraps(whole_call)
    def call(*args: Any, **options: Any) -> Any:
        before = {name: vars(layer)[name] for name in counts}
        vars(layer).update(counts)
        try:
            return whole_call(*args, **options)
        finally:
            vars(layer).update(before)

    return call


def refuse_other_weights(layer: Any) -> None:
    """Reject layers with weights besides the kernel. Raises ConfigError for LoRA or quantization."""
    rounds = getattr(vars(layer).get("call"), "needs_whole_kernel", False)
    if getattr(layer, "lora_enabled", False) or layer.quantization_mode is not None or rounds:
        raise ConfigError(
            f"{described(layer)} has a LoRA or is quantized, and cannot be cut: enable that after training, or leave "
            "its variables whole."
        )


def check_activation(layer: Any, length: int) -> None:
    """Reject an activation that mixes sharded features, such as softmax (ConfigError)."""
    activation = getattr(layer, "activation", None)
    if activation is None or activation is keras.activations.linear:
        return
    if isinstance(activation, keras.Layer) and activation.trainable_variables:
        raise ConfigError(
            f"The activation of {described(layer)} has weights of its own, {type(activation).__name__}, and sees a "
            "slice of the features: call it as a layer of the model, behind this one."
        )
    features = keras.ops.convert_to_tensor([[0.3, -0.7, 1.9, -2.5, 0.1, 1.1, -0.2, 3.0]], layer.compute_dtype)
    whole, part = activation(features), activation(features[:, :3])
    # Vectorized functions round the last few elements of a row in another way.
    alike = part.shape[-1] == 3 and float(keras.ops.max(keras.ops.abs(whole[:, :3] - part))) < 1e-2
    if not alike:
        raise ConfigError(
            f"The activation of {described(layer)} looks at all of its {length} features, of which each rank has a "
            "part. Give it an elementwise activation, or leave the layer whole."
        )


def check_additive(variable: Any, layer: Any) -> None:
    """Reject constraints and activity regularizers, which need the full variable or activation."""
    if variable.constraint is not None and not isinstance(variable.constraint, keras.constraints.NonNeg):
        raise ConfigError(
            f"The constraint of {variable.path!r} looks at the whole variable, of which each rank has a slice: leave "
            "the constraint out, or the variable whole."
        )
    if getattr(layer, "activity_regularizer", None) is not None:
        raise ConfigError(
            f"The activity regularizer of {described(layer)} looks at the whole output, of which each rank has a part: "
            "leave it out, or the layer whole."
        )


def cut_output(layer: Any, group: Group, name: str, *, whole: bool) -> None:
    """Make `layer` shard its output along the sequence, or gather it; `name` as for `install`."""
    call = layer.call

    def cutting(*args: Any, **options: Any) -> Any:
        outputs = call(*args, **options)
        with group.record.call(described(layer) + BY_OUTPUT_RULE) as flow:
            if whole:
                flow.takes.append((outputs, SEQUENCE_DIM - outputs.shape.rank))
                return gather_from(outputs, group.exchange, SEQUENCE_DIM, name=numbered(f"{name}/gathered"))
            _check_length(layer, outputs, group.exchange.size)
            outputs = slice_to(outputs, group.exchange, SEQUENCE_DIM, name=numbered(f"{name}/cut"))
            flow.gives.append((outputs, SEQUENCE_DIM - outputs.shape.rank))
            return outputs

    replace_call(layer, cutting)


def _check_length(layer: Any, outputs: Any, ranks: int) -> None:
    length = outputs.shape[SEQUENCE_DIM] if outputs.shape.rank == 3 else None
    if length is None or length % ranks:
        raise ConfigError(
            f"{opt('sequence_parallel')} cuts the output of {described(layer)} along the sequence, which tp={ranks} "
            "must "
            f"divide. Received: the shape {shown(outputs.shape)} [batch, sequence, features]."
        )


@contextmanager
def recorded(layers: Sequence[Any], outputs: Sequence[Any], record: FlowRecord) -> Iterator[None]:
    """Record calls of `layers` and `outputs`' outputs inside this context."""
    for layer in layers:
        replace_call(layer, _recording(layer, layer.call, record))
    for layer in outputs:
        replace_call(layer, _recording_output(layer, layer.call, record))
    try:
        yield
    finally:
        for layer in [*layers, *outputs]:
            vars(layer).pop("call", None)


def _recording(layer: Any, call: Callable[..., Any], record: FlowRecord) -> Callable[..., Any]:
    def recording(*args: Any, **options: Any) -> Any:
        with record.call(described(layer)):
            return call(*args, **options)

    return recording


def _recording_output(layer: Any, call: Callable[..., Any], record: FlowRecord) -> Callable[..., Any]:
    def recording(*args: Any, **options: Any) -> Any:
        outputs = call(*args, **options)
        with record.call(described(layer) + BY_OUTPUT_RULE):  # where it will be sharded
            return tf.identity(outputs)

    return recording
