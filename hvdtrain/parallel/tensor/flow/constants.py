"""Propagate constants, and random numbers for sharded or full activations."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.flow.operations import ELEMENTWISE, FILLED, Layout, spans

UNSEEDED = ""
"""Marks random ops that use none of the model's SeedGenerators."""


@dataclass
class RandomUse:
    """Paths of random generators, by how their numbers are used."""

    sharded: set[str] = field(default_factory=set)
    """For shards: ranks need different numbers, as for different parts of one mask."""
    replicated: set[str] = field(default_factory=set)
    """For replicated tensors: ranks need the same numbers."""

    def use_on_shard(self, op: Any, inputs: Sequence[Layout], whole: Any, where: str) -> None:
        """Record the random numbers used in an operation on a shard.

        `whole` is the full model's operation: a shard may have one element where the full tensor has several. Raises
        ConfigError for numbers from outside the model's generators.
        """
        place = next(
            layout.dim - tensor.shape.rank
            for tensor, layout in zip(op.inputs, inputs, strict=True)
            if layout.dim is not None
        )
        for tensor, layout in zip(whole.inputs, inputs, strict=True):
            if layout.dim is not None or not layout.generators:
                continue
            if not spans(tensor, place):
                self.replicated |= layout.generators
            elif UNSEEDED in layout.generators:
                raise ConfigError(
                    f"{where} draws at random for slices of activations, and ranks would draw the same for all of "
                    "them. Give the layer a keras.random.SeedGenerator as an attribute, and draw by it: "
                    "keras.random.normal(shape, seed=self.seed_generator)."
                )
            else:
                self.sharded |= layout.generators

    def use_replicated(self, layouts: Sequence[Layout]) -> None:
        """Record the random numbers used in an operation on full activations."""
        for layout in layouts:
            self.replicated |= layout.generators

    def check(self) -> None:
        """Reject a generator used for both shards and full activations. Raises ConfigError naming it."""
        both = sorted(self.sharded & self.replicated)
        if both:
            raise ConfigError(
                f"The random generator {both[0]!r} is used for shards of activations, for which each rank needs other "
                "numbers, and for replicated tensors. Use a layer, or a SeedGenerator, for each."
            )


_DRAWN = ("StatelessRandom", "Random")
_OF_SEEDS = "StatelessRandomGet"


def of_constants(op: Any, inputs: Sequence[Layout]) -> Layout:
    """Return the layout of an operation on constants."""
    generators = frozenset().union(*(layout.generators for layout in inputs))
    if op.type.startswith(_DRAWN) and not op.type.startswith(_OF_SEEDS) and not generators:
        generators = frozenset([UNSEEDED])  # from a state of TensorFlow's own, or a seed that never changes
    if op.type.startswith(_DRAWN) or op.type in FILLED:
        return Layout(constant=True, even=True, generators=generators)
    if inputs and op.type in ELEMENTWISE:
        even = all(layout.even for layout in inputs)
        return Layout(constant=True, even=even, even_dims=even_dims(op, inputs), generators=generators)
    return Layout(constant=True, even=op.type == "Const" and _of_one_value(op.outputs[0]), generators=generators)


def even_dims(op: Any, inputs: Sequence[Layout]) -> frozenset[int]:
    """Return the dims, from the last, along which the result of an elementwise operation is the same everywhere."""
    rank = op.outputs[0].shape.rank
    return frozenset(
        dim
        for dim in range(-(rank or 0), 0)
        if all(_is_even(tensor, layout, dim) for tensor, layout in zip(op.inputs, inputs, strict=True))
    )


def _is_even(tensor: Any, layout: Layout, dim: int) -> bool:
    rank = tensor.shape.rank
    return layout.even or dim in layout.even_dims or (rank is not None and (rank < -dim or tensor.shape[dim] == 1))


def _of_one_value(tensor: Any) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and (value.size <= 1 or bool((value == value.flat[0]).all()))


def compare_numbers(mine: Any, theirs: Any, place: str) -> None:
    """Reject a float computed from a shard's size: `theirs` is the full model's. Raises ConfigError with both."""
    if mine.type not in ("Const", "Cast") or not mine.outputs[0].dtype.is_floating:
        return
    value, whole = (_number(op.outputs[0] if op.type == "Const" else op.inputs[0]) for op in (mine, theirs))
    if value is None or whole is None or value.shape != whole.shape or value.tobytes() == whole.tobytes():
        return
    raise ConfigError(
        f"{place} computes with a size of which each rank along tp has a part: {whole} of the whole, and {value} of a "
        "slice. Take that number from the configuration of the layer, or leave the layer before it whole."
    )


def _number(tensor: Any) -> Any:
    """Return the value of a constant, or of one element of a shape."""
    if tensor.op.type != "StridedSlice" or tensor.shape.rank != 0 or tensor.op.inputs[0].shape.rank != 1:
        return tf.get_static_value(tensor)
    shape, place = (tf.get_static_value(each) for each in tensor.op.inputs[:2])
    return None if shape is None or place is None else shape[int(place[0])]
