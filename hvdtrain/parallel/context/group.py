"""What the layers of a model whose sequences are cut share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hvdtrain.backends.protocol import Collectives
from hvdtrain.parallel.context.positions import Positions
from hvdtrain.parallel.tensor.flow.record import FlowRecord


@dataclass
class Group:
    """The ranks among which sequences are cut."""

    exchange: Collectives
    record: FlowRecord = field(default_factory=FlowRecord)
    """Where layers note what they take and give while the model is checked."""
    cuts: bool = False
    """Whether sequences are cut: not while the whole model is traced."""

    @property
    def positions(self) -> Positions:
        """The slice that this rank has."""
        return Positions(self.exchange.index, self.exchange.size)

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Let layers compute all positions inside this context, as in one process."""
        before, self.cuts = self.cuts, False
        try:
            yield
        finally:
            self.cuts = before
