"""A model's outputs by name, with their targets, weights, losses and metrics."""

from collections.abc import Sequence
from typing import Any

from hvdtrain.compat.keras import input_nest
from hvdtrain.config.errors import ConfigError

ONLY = ""
"""Name of a single-output model's output."""


def outputs_by_name(outputs: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return outputs by name: dict keys, names of a Functional model's outputs, or indices."""
    if isinstance(outputs, dict):
        return {str(key): value for key, value in outputs.items()}
    if not isinstance(outputs, list | tuple):
        return {ONLY: outputs}
    known = names if names is not None and len(names) == len(outputs) else [f"output{i}" for i in range(len(outputs))]
    return dict(zip(known, outputs, strict=True))


def per_output(what: str, values: Any, names: Sequence[str], *, shared: bool) -> dict[str, Any]:
    """Return each output's value: from a dict by name, from a list by index, None if missing.

    For a model with one output, `values` is the value itself; `shared` applies a single value to all outputs. Raises
    ConfigError for another number, or an unknown name.
    """
    if values is None:
        return dict.fromkeys(names)
    if list(names) == [ONLY]:
        return {ONLY: _the_one(what, values) if shared else values}
    if isinstance(values, dict):
        strangers = [key for key in values if key not in names]
        if strangers:
            raise ConfigError(f"{what} names {strangers[0]!r}; the model's outputs are {', '.join(names)}.")
        return {name: values.get(name) for name in names}
    if isinstance(values, list | tuple):
        if len(values) != len(names):
            raise ConfigError(
                f"{what} has {len(values)} entries for the {len(names)} outputs {', '.join(names)}: give one for each."
            )
        return dict(zip(names, values, strict=True))
    if not shared and len(names) > 1:
        raise ConfigError(f"{what} must be a dict or list with one entry for each of the outputs {', '.join(names)}.")
    return dict.fromkeys(names, values)


def _the_one(what: str, values: Any) -> Any:
    """Return a single output's value: the value itself, or the only item of a list or dict."""
    if not isinstance(values, dict | list | tuple):
        return values
    entries = list(values.values()) if isinstance(values, dict) else list(values)
    if len(entries) != 1:
        raise ConfigError(f"{what} has {len(entries)} entries, and the model has one output.")
    return entries[0]


def inputs_for(model: Any, inputs: Any) -> Any:
    """Convert tf.data's tuple of inputs to a list if models expect it."""
    listed = isinstance(inputs, tuple) and isinstance(input_nest(model), list)
    return list(inputs) if listed else inputs
