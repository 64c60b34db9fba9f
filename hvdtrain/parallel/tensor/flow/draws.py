"""What the random generators of a model draw for: slices of activations, or whole ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.flow.layouts import Layout, spans

UNSEEDED = ""
"""In place of the path of a generator: a draw that none of the model's generators makes."""


@dataclass
class Draws:
    """Paths of random generators by what they draw for."""

    of_slices: set[str] = field(default_factory=set)
    """For slices: each rank needs other numbers, as the other slices of one mask would be."""
    of_wholes: set[str] = field(default_factory=set)
    """For what several ranks have alike, or for all slices together: each rank needs the same numbers."""

    def meet_slice(self, op: Any, inputs: Sequence[Layout], whole: Any, where: str) -> None:
        """Note what is drawn for an operation on a slice.

        Args:
            op: the operation.
            inputs: layouts of its inputs.
            whole: the same one in the whole model: a slice may have one element where the whole has several.
            where: it is, for messages.

        Raises:
            ConfigError: ranks would draw the same for different slices, as no generator of the model draws.
        """
        place = next(
            layout.dim - tensor.shape.rank
            for tensor, layout in zip(op.inputs, inputs, strict=True)
            if layout.dim is not None
        )
        for tensor, layout in zip(whole.inputs, inputs, strict=True):
            if layout.dim is not None or not layout.draws:
                continue
            if not spans(tensor, place):
                self.of_wholes |= layout.draws
            elif UNSEEDED in layout.draws:
                raise ConfigError(
                    f"{where} draws at random for slices of activations, and ranks would draw the same for all of "
                    "them. Give the layer a keras.random.SeedGenerator as an attribute, and draw by it: "
                    "keras.random.normal(shape, seed=self.seed_generator)."
                )
            else:
                self.of_slices |= layout.draws

    def meet_whole(self, layouts: Sequence[Layout]) -> None:
        """Note what is drawn for an operation on whole activations."""
        for layout in layouts:
            self.of_wholes |= layout.draws

    def check(self) -> None:
        """Refuse a generator that would have to draw alike and apart.

        Raises:
            ConfigError: naming it.
        """
        both = sorted(self.of_slices & self.of_wholes)
        if both:
            raise ConfigError(
                f"The random generator {both[0]!r} draws for slices of activations, for which each rank needs other "
                "numbers, and for what all ranks have alike. Use a layer, or a SeedGenerator, for each."
            )
