"""How a tensor lies on the ranks of a group, while it is followed through a graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on the ranks of a group, and what it was computed from."""

    dim: int | None = None
    """The dim, from 0, of which each rank has a slice; None: every rank has the whole."""
    origin: str = ""
    """The layer that made it so."""
    learned: bool = False
    """Whether a gradient that reaches it goes on to a variable."""
    parameters: frozenset[str] = frozenset()
    """Paths of the whole variables that it was computed from, where these, and constants, are all it depends on."""
    constant: bool = False
    """Whether it depends on neither inputs nor learned variables."""
    even: bool = False
    """Whether any slice of it would serve as well as another: it is a scalar, of one value, or drawn at random."""
    even_dims: frozenset[int] = frozenset()
    """Dims, counted from the last, along which any slice would serve as well."""
    draws: frozenset[str] = frozenset()
    """Paths of the random generators that it was drawn by."""
    blocks: tuple[int, ...] = ()
    """Lengths of the blocks that the sharded dim has side by side, each of them a slice; none of a plain slice."""


SHAPE = Layout(constant=True)
Rule = Callable[[Any, Sequence[Layout]], Sequence[Layout] | None]
"""What an operation makes of the layouts of its inputs; see `operations.py`."""


def joined(layouts: Sequence[Layout], dim: int | None) -> Layout:
    """Return the layout of what is computed from tensors of `layouts`, sharded along `dim`."""
    origin = next((layout.origin for layout in layouts if layout.dim is not None), "")
    return Layout(dim, origin, learned=any(layout.learned for layout in layouts))


def spans(tensor: Any, place: int) -> bool:
    """Whether a tensor may have several elements along a dim, counted from the last, of what it is broadcast to."""
    rank = tensor.shape.rank
    return rank is None or (rank >= -place and tensor.shape[place] != 1)


def constant_value(tensor: Any) -> Any:
    """Return the value of a tensor, an array; None if the graph does not tell."""
    return tf.get_static_value(tensor)
