"""Rules that say along which dim a variable is cut, by its path: the vocabulary of Keras' `LayoutMap`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hvdtrain.config.errors import ConfigError

AXIS = "tp"
OUTPUT = "/output"
"""Ends expressions that are about the output of a layer, as in Keras' `LayoutMap`."""
Layout: TypeAlias = Sequence[str | None]
"""The axis that each dim of a variable is cut along, or None: `(None, "tp")` cuts columns."""
Rules: TypeAlias = Mapping[str, Layout]
"""Layouts by regular expression, searched in the paths of Keras variables such as `block0_mlp_in/kernel`."""


@dataclass(frozen=True)
class Cut:
    """The slice of one dim of a variable that a rank holds."""

    dim: int
    index: int
    """This rank's place in its group."""
    ranks: int
    """The number of ranks in the group."""
    whole: tuple[int, ...]
    """Shape of the whole variable."""

    @property
    def length(self) -> int:
        """The length of the slice."""
        return self.whole[self.dim] // self.ranks

    @property
    def start(self) -> int:
        """The first index of the slice."""
        return self.index * self.length

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the slice."""
        return (*self.whole[: self.dim], self.length, *self.whole[self.dim + 1 :])

    @property
    def box(self) -> tuple[slice, ...]:
        """The slice of each dim."""
        own = slice(self.start, self.start + self.length)
        return tuple(own if dim == self.dim else slice(0, length) for dim, length in enumerate(self.whole))


class LayoutRules:
    """Checked rules, which remember what they matched.

    Args:
        rules: layouts by regular expression.

    Raises:
        ConfigError: no rules, an expression that is none, or a layout that names another axis or several dims.
    """

    def __init__(self, rules: Rules) -> None:
        if not isinstance(rules, Mapping) or not rules:
            raise ConfigError(
                'Rules map regular expressions of variable paths to layouts, such as {"mlp_in/kernel": (None, "tp")}. '
                f"Received: {rules!r}."
            )
        checked = {expression: _checked(expression, layout) for expression, layout in rules.items()}
        self._outputs = {e: (_compiled(e), layout) for e, layout in checked.items() if e.rstrip("$").endswith(OUTPUT)}
        self._layouts = {
            expression: layout for expression, layout in checked.items() if expression not in self._outputs
        }
        self._compiled = {expression: _compiled(expression) for expression in self._layouts}
        self._matched: set[str] = set()

    def dim_of(self, path: str, shape: Sequence[int]) -> int | None:
        """Return the dim along which the variable at `path` is cut; None if it stays whole.

        As in Keras' `LayoutMap`, an expression that equals the path comes first; otherwise one alone may match.

        Raises:
            ConfigError: two rules that match, or a layout of another number of dims.
        """
        found = (
            [path] if path in self._layouts else [e for e, compiled in self._compiled.items() if compiled.search(path)]
        )
        if len(found) > 1:
            raise ConfigError(
                f"The variable {path!r} is matched by two rules, {found[0]!r} and {found[1]!r}: one alone may say how "
                "it is cut. Write the expressions more narrowly, or take the whole path for one of them."
            )
        if not found:
            return None
        self._matched.add(found[0])
        layout = self._layouts[found[0]]
        if len(layout) != len(shape):
            raise ConfigError(
                f"The rule {found[0]!r} needs one entry for each dim of {path!r}, which has the shape {tuple(shape)}. "
                f"Received: {layout}."
            )
        return layout.index(AXIS) if AXIS in layout else None

    def output_of(self, path: str) -> bool | None:
        """Return whether a rule cuts the output of the layer at `path` (True) or makes it whole (False); else None.

        Raises:
            ConfigError: a layout of an output that is not cut along the sequence.
        """
        for expression, (compiled, layout) in self._outputs.items():
            if compiled.search(f"{path}{OUTPUT}"):
                self._matched.add(expression)
                if layout not in ((None, AXIS, None), (None, None, None)):
                    raise ConfigError(
                        f"An output is cut along the sequence, (None, 'tp', None), or whole, (None, None, None). "
                        f"Received: {layout} for {expression!r}."
                    )
                return AXIS in layout
        return None

    def check_used(self, paths: Sequence[str]) -> None:
        """Refuse rules that matched nothing.

        Args:
            paths: of the model's variables, for the message.

        Raises:
            ConfigError: names the first.
        """
        unused = [expression for expression in (*self._layouts, *self._outputs) if expression not in self._matched]
        if unused:
            shown = ", ".join(paths[:8]) + (f" … ({len(paths)} variables)" if len(paths) > 8 else "")
            what = "layer" if unused[0] in self._outputs else "variable"
            raise ConfigError(f"The rule {unused[0]!r} matches no {what} of the model, which has {shown}.")


def cut_along(path: str, shape: Sequence[int], dim: int, index: int, ranks: int) -> Cut:
    """Return the slice of the variable at `path` that rank `index` of `ranks` holds.

    Raises:
        ConfigError: the ranks do not divide the dim.
    """
    whole = tuple(int(n) for n in shape)
    if whole[dim] % ranks:
        raise ConfigError(
            f"tp={ranks} does not divide the {_noun(path, dim, len(whole))} of {path!r}, which has the shape {whole}. "
            f"Received: {whole[dim]} on dim {dim}. Choose a tp that divides it, or leave the variable whole."
        )
    return Cut(dim, index, ranks, whole)


def _noun(path: str, dim: int, rank: int) -> str:
    """Return what the elements of a dim are called, as far as the path tells."""
    if re.search(r"(query|key|value|gate)/(kernel|bias)$", path) and dim == rank - 2:
        return "heads"
    if path.endswith("attention_output/kernel") and rank == 3 and dim == 0:
        return "heads"
    if path.endswith("embeddings"):
        return "vocabulary" if dim == 0 else "width"
    return "features"


def _checked(expression: str, layout: Layout) -> tuple[str | None, ...]:
    names = tuple(layout) if isinstance(layout, Sequence) and not isinstance(layout, str) else (layout,)
    if isinstance(layout, str) or any(name not in (None, AXIS) for name in names) or names.count(AXIS) > 1:
        raise ConfigError(
            f"A layout has one entry for each dim: None, and {AXIS!r} at most once. Received: {layout!r} for "
            f"{expression!r}."
        )
    return names


def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except (re.error, TypeError) as error:
        raise ConfigError(f"The rule {expression!r} is no regular expression: {error}.") from error
