"""Sharding rules by variable path, in the vocabulary of Keras' `LayoutMap`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.cuts import Cut, FusedHeads, even_cut, fused_cut

AXIS = "tp"
OUTPUT = "/output"
"""Suffix of rules for a layer's output, as in Keras' `LayoutMap`."""
Layout: TypeAlias = Sequence[str | FusedHeads | None]
"""The mesh axis of each dim, or None: `(None, "tp")` shards columns.

`FusedHeads` means tp for a dim of several fused blocks, each sharded separately.
"""
Rules: TypeAlias = Mapping[str, Layout]
"""Layouts by regular expression, searched in the paths of Keras variables such as `block0_mlp_in/kernel`."""
KERAS_HUB = "keras_hub"
"""In place of rules: those of `DECODERS` that a model has variables for."""
DECODERS: Rules = {
    r"transformer_layer_\d+/(self_)?attention/(query|key|value)/kernel": (None, AXIS, None),
    r"decoder_block_\d+/attention/(query|key|value)/kernel": (AXIS, None, None),  # Gemma's heads come first
    r"attention/attention_output/kernel": (AXIS, None, None),
    r"(feedforward|mlp)_(intermediate|gate)_dense/kernel": (None, AXIS),
    r"(ffw_gating(_2)?|mlp/(gate|up)_proj|dense_h_to_4h)/kernel": (None, AXIS),
    r"((feedforward|mlp)_output_dense|ffw_linear|mlp/down_proj|dense_4h_to_h)/kernel": (AXIS, None),
    r"token_embedding/embeddings": (AXIS, None),
    r"token_embedding/reverse_embeddings": (None, AXIS),
}
"""Layouts of KerasHub's decoders, and of what is built of their layers; what no rule is for stays whole.

So does attention that needs to know all heads (Bloom's and Falcon's biases) or joins them by a fixed width (GPT-NeoX).
"""


class LayoutRules:
    """Validated rules, which record their matches.

    Args:
        rules: layouts by regular expression.
        of_many: whether they are for many models, of which each matches some.

    Raises:
        ConfigError: no rules, an invalid expression, or a layout with another axis or several dims.
    """

    def __init__(self, rules: Rules, *, of_many: bool = False) -> None:
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
        self._of_many = of_many

    def cut_of(self, path: str, shape: Sequence[int], index: int, ranks: int) -> Cut | None:
        """Return the shard of the variable `path` on rank `index` of `ranks`; None if not sharded.

        As in Keras' `LayoutMap`, an exact match has priority; otherwise only one expression may match. Raises
        ConfigError: two matching rules, a wrong number of dims, or a dim not divisible by the ranks.
        """
        found = (
            [path] if path in self._layouts else [e for e, compiled in self._compiled.items() if compiled.search(path)]
        )
        if len(found) > 1:
            raise ConfigError(
                f"The variable {path!r} is matched by two rules, {found[0]!r} and {found[1]!r}: one alone may say how "
                "it is cut. Write the expressions more narrowly, or take the whole path for one of them."
            )
        if self._of_many:  # a layer of that name in another family may have another kernel
            found = [expression for expression in found if len(self._layouts[expression]) == len(shape)]
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
        """Return True if a rule shards an output, False if gathers, or None.

        Raises ConfigError for another layout of an output.
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
        """Reject rules without a match, listing variable `paths`."""
        unused = [expression for expression in (*self._layouts, *self._outputs) if expression not in self._matched]
        if unused and not (self._of_many and self._matched):
            shown = ", ".join(paths[:8]) + (f" … ({len(paths)} variables)" if len(paths) > 8 else "")
            what = "layer" if unused[0] in self._outputs else "variable"
            raise ConfigError(f"The rule {unused[0]!r} matches no {what} of the model, which has {shown}.")


def cut_along(path: str, shape: Sequence[int], dim: int, index: int, ranks: int, entry: Any = AXIS) -> Cut:
    """Return the shard of the variable `path` on rank `index` of `ranks`; `shape` is the full one.

    Shards of a vocabulary, or of classes, may differ in length. Raises ConfigError if the dim, or the heads of a block,
    are not divisible by the ranks.
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
    """Return whether uneven shards are supported: of a vocabulary, and of possible logits.

    Other features reach a layer that is sharded along them, whose kernel may not divide the same way.
    """
    if path.endswith("embeddings"):
        return dim == int(path.endswith("reverse_embeddings"))
    return dim == len(whole) - 1 <= 1


def _noun(path: str, dim: int, rank: int) -> str:
    """Return the noun for a dim's elements, guessed from the path."""
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
        raise ConfigError(f"The rule {expression!r} is not a regular expression: {error}.") from error
