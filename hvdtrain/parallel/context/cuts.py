"""Where sequences are cut: what embeddings look up, and the outputs of layers that a rule names."""

from typing import Any

import keras

from hvdtrain.compat.keras import mask_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.context.group import Group
from hvdtrain.parallel.context.positions import POSITION_DIM
from hvdtrain.parallel.tensor.flow.record import BY_OUTPUT_RULE
from hvdtrain.parallel.tensor.layers.base import calls_as, described, replace_call

EMBEDDINGS = (keras.layers.Embedding, keras.layers.ReversibleEmbedding)


def is_embedding(layer: Any) -> bool:
    """Whether a layer looks rows up as Keras' embeddings do."""
    return any(calls_as(layer, kind) for kind in EMBEDDINGS)


def cut_lookups(layer: Any, group: Group, length: int) -> None:
    """Let an embedding look up this rank's positions alone of sequences of `length`.

    Other inputs, such as a class of each sample, stay whole. Positions are looked up like tokens: numbers from 0 to
    the length, [positions] or [1, positions], are cut like the tokens that they belong to.
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
            dim = _dim_of(inputs, length, group, lists)
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
            dim = _dim_of(inputs, length, group, lists)
            if mask is None or dim is None:
                return mask
            mask = group.positions.of(mask, dim)
            flow.gives.append((mask, dim - mask.shape.rank))
            return mask

    replace_call(layer, call)
    vars(layer)["compute_mask"] = compute_mask


class _Lists:
    """Whether the lists that an embedding looks up have an element for each position, or for each sample.

    While the model is checked a batch has no size; later one may have as many samples as a sequence has positions.
    """

    def __init__(self, name: str, group: Group) -> None:
        self._name = name
        self._group = group
        self._of_positions: bool | None = None

    def have_positions(self, size: int | None, length: int) -> bool:
        """Return what was found when the model was checked.

        Raises:
            ConfigError: the embedding looks up both.
        """
        if self._group.record.graph is None:
            return bool(self._of_positions)
        if self._of_positions not in (None, size == length):
            raise ConfigError(
                f"{self._name} looks up positions, and a number of each sample, and cannot tell them apart in a batch "
                f"of {length} samples: use an embedding for each."
            )
        self._of_positions = size == length
        return self._of_positions


def _dim_of(inputs: Any, length: int, group: Group, lists: _Lists) -> int | None:
    """Return the dim of what is looked up that counts positions; None where it has none, or all are wanted."""
    rank = inputs.shape.rank
    if rank == 1:
        return 0 if lists.have_positions(inputs.shape[0], length) and group.cuts else None
    if not group.cuts or not rank or inputs.shape[POSITION_DIM] != length:
        return None
    return POSITION_DIM


def cut_output(layer: Any, group: Group) -> None:
    """Let `layer` give this rank's positions of its output alone."""
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
    """Return the function that lets every dim but the last be a slice, and keeps its place."""
    last = int(inputs.shape.rank) - 1
    return lambda dim: None if dim == last else dim
