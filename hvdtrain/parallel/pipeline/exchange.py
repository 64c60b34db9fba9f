"""Transfer of activations and gradients between neighbouring pipeline stages.

Horovod has no point-to-point messages: a broadcast in a process set of two ranks replaces them. Messages are matched by
name, a pure function of direction, stage, tensor and microbatch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras import mask_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.pipeline.cut import Cut
from hvdtrain.parallel.pipeline.graph import specs_of

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor between two stages."""

    shape: tuple[int | None, ...]
    """None for the microbatch's samples."""
    dtype: tf.DType

    @property
    def is_float(self) -> bool:
        """Whether the tensor has a gradient."""
        return bool(self.dtype.is_floating)


class StageExchange:
    """Sends tensors to neighbouring stages and receives theirs, within a compiled function.

    `pair_with` returns the collectives of this rank and another one, by index.
    """

    def __init__(self, place: int, ranks: int, pair_with: Callable[[int], Collectives]) -> None:
        self._place, self._ranks = place, ranks
        self._pair_with = pair_with
        # TensorFlow prunes operations with unused results, such as a rank's own sends, or the gradient of a microbatch
        # without samples. The other rank would wait forever.
        self._read = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="pipeline_exchanged")
        self._exchanged: list[tf.Tensor] = []

    def send(self, tensors: Sequence[tf.Tensor], stage: int, to: int, label: str, direction: Direction) -> None:
        """Send `tensors` to a neighbouring stage; `finish` must follow in the same function.

        `label` distinguishes repeated transfers, such as the microbatch's number.
        """
        pair = self._pair(to)
        for number, tensor in enumerate(tensors):
            name = _name(direction, stage, number, label)
            self.keep(pair.broadcast_value(tensor, root=pair.index, name=name))

    def receive(
        self, specs: Sequence[Spec], rows: Any, stage: int, label: str, direction: Direction
    ) -> list[tf.Tensor]:
        """Return a neighbouring stage's tensors of `rows` samples (int or tensor)."""
        pair = self._pair(stage)
        received = []
        for number, spec in enumerate(specs):
            shape = [rows if dim is None else dim for dim in spec.shape]
            room = tf.fill(shape, tf.zeros([], spec.dtype))
            came = pair.broadcast_value(room, root=1 - pair.index, name=_name(direction, stage, number, label))
            self.keep(came)
            received.append(tf.ensure_shape(came, room.shape))
        return received

    def finish(self) -> None:
        """Force all pending transfers to complete before the function ends."""
        if self._exchanged:
            self._read.assign(tf.reduce_sum(tf.concat(self._exchanged, 0)))
            self._exchanged.clear()

    def keep(self, tensor: tf.Tensor) -> None:
        """Protect the result of a transfer from TensorFlow's pruning."""
        self._exchanged.append(tf.cast(tf.reshape(tensor, [-1])[:1], tf.float64))

    def _pair(self, stage: int) -> Collectives:
        return self._pair_with(stage % self._ranks)


def _name(direction: Direction, stage: int, number: int, label: str) -> str:
    return f"{direction}/{stage}/{number}/{label}"


def check_shapes(cut: Cut, inputs: Mapping[int, Any], stage: int, tensors: Sequence[tf.Tensor]) -> None:
    """Reject outputs of `stage` with other shapes than the next one expects: it would deadlock.

    `inputs` as for `boundary_specs`. Raises ConfigError naming a tensor.
    """
    symbols = cut.outgoing(stage)
    for place, (spec, tensor) in enumerate(zip(boundary_specs(cut, inputs, stage), tensors, strict=True)):
        if not tensor.shape.is_compatible_with(spec.shape) or tensor.dtype != spec.dtype:
            raise ConfigError(
                f"Stage {stage} passes on a tensor of another shape than the model's graph has. Received: "
                f"{list(tensor.shape)} {tensor.dtype.name} of {symbols[place % len(symbols)].name!r}, which has "
                f"{list(spec.shape)} {spec.dtype.name} there. Mend its compute_output_shape."
            )


def boundary_specs(cut: Cut, inputs: Mapping[int, Any], stage: int) -> list[Spec]:
    """Return the specs of tensors sent by `stage`, masks last.

    Shapes are local: of sequences sharded along cp, a rank sends its shard.

    Args:
        inputs: tensors of a batch, by the id of the model's symbolic inputs.
        stage: any but the last; for the last, the specs of the model's full outputs.

    Raises:
        ConfigError: a size is not known statically.
    """
    symbols = cut.outgoing(stage)
    shapes = {id(symbol): tuple(inputs[id(symbol)].shape) for symbol in cut.graph.inputs}
    specs = []
    for symbol, shape in zip(symbols, specs_of(cut.graph, shapes, symbols), strict=True):
        if any(dim is None for dim in shape[1:]):
            raise ConfigError(
                f"Stages exchange tensors of known sizes. Received: {symbol.name!r} between stages {stage} and "
                f"{stage + 1} with the shape {list(shape)}. Pad the samples to one length."
            )
        here = cut.slices.shape_here(symbol, shape) if stage + 1 < cut.stages else shape
        specs.append(Spec(here, tf.as_dtype(symbol.dtype)))
    known = dict(zip(map(id, symbols), specs, strict=True))
    of_masked = [(known[id(symbol)].shape, len(mask_of(symbol).shape)) for symbol in cut.masked(stage)]
    return [*specs, *(Spec(shape[:rank], tf.bool) for shape, rank in of_masked)]
