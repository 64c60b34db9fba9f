"""Model outputs sharded by position, with matching targets."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.backends.differentiable import gather_to
from hvdtrain.backends.protocol import Collectives
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.parallel.tensor.outputs import OutputLayout
from hvdtrain.runtime.compiled import numbered

POSITION_DIM = 1
"""Position dim of tensors, [batch, positions, …]."""
_ATTRIBUTE = "_hvdtrain_positions"


@dataclass(frozen=True)
class Positions:
    """A rank's shard of the positions."""

    index: int
    ranks: int

    def of(self, tensor: Any, dim: int = POSITION_DIM, *, what: str = "sequence") -> Any:
        """Return this rank's shard of `tensor` along `dim`.

        Raises ConfigError if the static length is not divisible by the ranks; for a dynamic length the step fails.
        """
        length = tensor.shape[dim]
        if length is not None and length % self.ranks:
            raise ConfigError(
                f"cp={self.ranks} does not divide the {length} positions of the {what}: choose a cp that does, or pad "
                f"the sequences. Received: the shape {tuple(tensor.shape)}."
            )
        known = tf.shape(tensor)[dim] if length is None else length
        share = known // self.ranks
        checks = [] if length is not None else [tf.debugging.assert_equal(share * self.ranks, known, _undivided(what))]
        with tf.control_dependencies([check for check in checks if check is not None]):
            own = [slice(None)] * dim + [slice(self.index * share, (self.index + 1) * share)]
            return tensor[tuple(own)]


def _undivided(what: str) -> str:
    return f"cp must divide the positions of the {what}: choose a cp that does, or pad the sequences."


class PositionSlices(OutputLayout):
    """Outputs sharded by position.

    `whole` returns a context in which the model's layers compute all positions.
    """

    attribute = "_hvdtrain_position_slices"

    def __init__(self, exchange: Collectives, whole: Callable[[], AbstractContextManager[None]]) -> None:
        self._exchange = exchange
        self.whole = whole
        self._positions = Positions(exchange.index, exchange.size)

    def tagged(self, outputs: Any) -> Any:
        """Mark `outputs` as sharded."""
        for tensor in tf.nest.flatten(outputs):
            setattr(tensor, _ATTRIBUTE, self._positions)
        return outputs

    def gathered(self, outputs: Any) -> Any:
        """All-gather `outputs` along the positions. Collective."""

        def whole(tensor: Any) -> Any:
            return gather_to(tensor, self._exchange, POSITION_DIM, name=numbered("context/outputs"))

        return tf.nest.map_structure(whole, outputs)

    @property
    def ranks(self) -> int:
        """Number of shards."""
        return self._positions.ranks


def positions_of(output: Any) -> Positions | None:
    """Return the shard of the positions in `output`; None if full."""
    return getattr(output, _ATTRIBUTE, None)


def with_positions(output: Any, positions: Positions) -> Any:
    """Return the shard of a full `output` at `positions`."""
    own = tf.identity(positions.of(output))
    setattr(own, _ATTRIBUTE, positions)
    return own


def belonging(output: Any, targets: Any, sample_weight: Any) -> tuple[Any, Any]:
    """Return the targets and weights for the positions of `output`.

    Per-sample weights, [samples] or [samples, 1], apply to each position. Raises ConfigError for targets without a
    position dim of matching length.
    """
    positions = positions_of(output)
    if positions is None:
        return targets, sample_weight
    targets = _of_positions(targets, output, positions, "targets")
    if sample_weight is None or _of_samples(sample_weight):
        return targets, sample_weight
    return targets, _of_positions(sample_weight, output, positions, "sample weights")


def _of_samples(sample_weight: Any) -> bool:
    return sample_weight.shape.rank == 1 or list(sample_weight.shape[1:]) == [1]


def _of_positions(tensor: Any, output: Any, positions: Positions, what: str) -> Any:
    tensor = tf.convert_to_tensor(tensor)
    length = output.shape[POSITION_DIM]
    fits = tensor.shape.rank is not None and tensor.shape.rank > POSITION_DIM
    if fits and None not in (length, tensor.shape[POSITION_DIM]):
        fits = tensor.shape[POSITION_DIM] == length * positions.ranks
    if not fits:
        whole = None if length is None else length * positions.ranks
        raise ConfigError(
            f"cp={positions.ranks} cuts {what} along the sequence, [batch, {whole}, …], as it does the outputs. "
            f"Received: {what} of the shape {tuple(tensor.shape)}. Leave cp out of {opt('parallel')}."
        )
    return positions.of(tensor, what=what)
