"""Rules that say along which dim a variable is cut, by its path: the vocabulary of Keras' `LayoutMap`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.cuts import Cut, FusedHeads, even_cut, fused_cut

AXIS = "tp"
OUTPUT = "/output"
"""Ends expressions that are about the output of a layer, as in Keras' `LayoutMap`."""
Layout: TypeAlias = Sequence[str | FusedHeads | None]
"""The axis that each dim of a variable is cut along, or None: `(None, "tp")` cuts columns. `FusedHeads` stands for tp
where each of several blocks is cut by itself."""
Rules: TypeAlias = Mapping[str, Layout]
"""Layouts by regular expression, searched in the paths of Keras variables such as `block0_mlp_in/kernel`."""


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
                f"Received: {rules!r}. hvdtrain.MixtureOfExperts is divided along tp without rules: a model in which "
                "nothing else is needs no hvdtrain.parallelize."
            )
        checked = {expression: _checked(expression, layout) for expression, layout in rules.items()}
        self._outputs = {e: (_compiled(e), layout) for e, layout in checked.items() if e.rstrip("$").endswith(OUTPUT)}
        self._layouts = {
            expression: layout for expression, layout in checked.items() if expression not in self._outputs
        }
        self._compiled = {expression: _compiled(expression) for expression in self._layouts}
        self._matched: set[str] = set()

    def cut_of(self, path: str, shape: Sequence[int], index: int, ranks: int) -> Cut | None:
        """Return the slice of the variable at `path` that rank `index` of `ranks` holds; None if it stays whole.

        As in Keras' `LayoutMap`, an expression that equals the path comes first; otherwise one alone may match.

        Raises:
            ConfigError: two rules that match, a layout of another number of dims, or ranks that do not divide one.
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
        dim = next((dim for dim, entry in enumerate(layout) if entry is not None), None)
        return (
            None if dim is None else cut_along(path, shape=shape, dim=dim, index=index, ranks=ranks, entry=layout[dim])
        )

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


def cut_along(path: str, shape: Sequence[int], dim: int, index: int, ranks: int, entry: Any = AXIS) -> Cut:
    """Return the slice of the variable at `path` that rank `index` of `ranks` holds.

    The slices of a vocabulary, or of classes, need not be of one length.

    Args:
        path: of the variable.
        shape: of the whole.
        dim: that is cut.
        index: the rank's place.
        ranks: their number.
        entry: of the layout.

    Raises:
        ConfigError: the ranks do not divide the dim, or the heads of a block.
    """
    whole = tuple(int(n) for n in shape)
    if isinstance(entry, FusedHeads):
        return fused_cut(path, whole=whole, dim=dim, index=index, ranks=ranks, fused=entry)
    if whole[dim] % ranks and not (_may_be_uneven(path, whole, dim) and whole[dim] >= ranks):
        raise ConfigError(
            f"tp={ranks} does not divide the {_noun(path, dim, len(whole))} of {path!r}, which has the shape {whole}. "
            f"Received: {whole[dim]} on dim {dim}. Choose a tp that divides it, or leave the variable whole."
        )
    return even_cut(whole, dim, index, ranks)


def _may_be_uneven(path: str, whole: Sequence[int], dim: int) -> bool:
    """Whether slices of different lengths have a meaning: of a vocabulary, and of what may be logits.

    Features of a kernel that are no logits arrive at a layer that is cut along them, whose kernel may not.
    """
    if path.endswith("embeddings"):
        return dim == int(path.endswith("reverse_embeddings"))
    return dim == len(whole) - 1 <= 1


def _noun(path: str, dim: int, rank: int) -> str:
    """Return what the elements of a dim are called, as far as the path tells."""
    if re.search(r"(query|key|value|gate)/(kernel|bias)$", path) and dim == rank - 2:
        return "heads"
    if path.endswith("attention_output/kernel") and rank == 3 and dim == 0:
        return "heads"
    if path.endswith("embeddings"):
        return "vocabulary" if dim == 0 else "width"
    return "features"


def _checked(expression: str, layout: Layout) -> tuple[str | FusedHeads | None, ...]:
    entries = tuple(layout) if isinstance(layout, Sequence) and not isinstance(layout, str) else (layout,)
    known = all(entry is None or entry == AXIS or isinstance(entry, FusedHeads) for entry in entries)
    if isinstance(layout, str) or not known or len(entries) - entries.count(None) > 1:
        raise ConfigError(
            f"A layout has one entry for each dim: None, and {AXIS!r} or hvdtrain.FusedHeads(…) at most once. "
            f"Received: {layout!r} for {expression!r}."
        )
    return entries


def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except (re.error, TypeError) as error:
        raise ConfigError(f"The rule {expression!r} is no regular expression: {error}.") from error
