"""Rules that say where sequences are cut, by the path of a layer: the vocabulary of Keras' `LayoutMap`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.rules import OUTPUT, Layout, LayoutRules

AXIS = "cp"


def separated(rules: Any) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Return the rules about other axes, and those that cut sequences along cp.

    Raises:
        ConfigError: a rule along cp that is none of an output [batch, positions, features].
    """
    if not isinstance(rules, Mapping | None):
        LayoutRules(rules)  # refuses whatever a user has written
    about = {expression: layout for expression, layout in (rules or {}).items() if _cuts_sequences(layout)}
    for expression, layout in about.items():
        if not expression.endswith(OUTPUT) or tuple(layout)[:2] != (None, AXIS) or any(tuple(layout)[2:]):
            raise ConfigError(
                "Along cp the output of a layer is cut, by its positions: "
                f'{{"LAYER/output": (None, "cp", None)}}. Received: {layout} for {expression!r}.'
            )
    return {expression: layout for expression, layout in (rules or {}).items() if expression not in about}, about


def _cuts_sequences(layout: Any) -> bool:
    return isinstance(layout, Sequence) and not isinstance(layout, str) and AXIS in layout


def named_layers(rules: Mapping[str, Layout], layers: Sequence[Any]) -> list[Any]:
    """Return those of `layers` that the rules name.

    Raises:
        ConfigError: a rule that names none.
    """
    found = []
    for expression in rules:
        matches = [layer for layer in layers if re.search(expression, f"{layer.path or layer.name}{OUTPUT}")]
        if not matches:
            names = ", ".join(layer.path or layer.name for layer in layers[:8])
            raise ConfigError(f"The rule {expression!r} matches no layer of the model, which has {names}.")
        found += matches
    return found
