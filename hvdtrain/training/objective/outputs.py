"""A model's outputs by name, and what belongs to each of them: targets, weights, losses, metrics."""

from collections.abc import Sequence
from typing import Any

from hvdtrain.config.errors import ConfigError

ONLY = ""
"""Name of the one output of a model that has no others."""


def outputs_by_name(outputs: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a model's outputs by name: a dict's keys, the names of a Functional model's outputs, or their places."""
    if isinstance(outputs, dict):
        return {str(key): value for key, value in outputs.items()}
    if not isinstance(outputs, list | tuple):
        return {ONLY: outputs}
    known = names if names is not None and len(names) == len(outputs) else [f"output{i}" for i in range(len(outputs))]
    return dict(zip(known, outputs, strict=True))


def spread(what: str, given: Any, heads: Sequence[str], *, to_all: bool) -> dict[str, Any]:
    """Hand `given` to the heads: a dict by their names, a list or tuple by their order, None to nobody.

    Args:
        what: what error messages call it.
        given: for the heads; where there is one head, the thing itself.
        heads: names of the outputs.
        to_all: whether one thing for several heads means each of them.

    Raises:
        ConfigError: another number, or a name that no output has.
    """
    if given is None:
        return dict.fromkeys(heads)
    if list(heads) == [ONLY]:
        return {ONLY: _the_one(what, given) if to_all else given}
    if isinstance(given, dict):
        strangers = [key for key in given if key not in heads]
        if strangers:
            raise ConfigError(f"{what} names {strangers[0]!r}; the model's outputs are {', '.join(heads)}.")
        return {head: given.get(head) for head in heads}
    if isinstance(given, list | tuple):
        if len(given) != len(heads):
            raise ConfigError(
                f"{what} has {len(given)} entries for the {len(heads)} outputs {', '.join(heads)}: give one for each."
            )
        return dict(zip(heads, given, strict=True))
    if not to_all and len(heads) > 1:
        raise ConfigError(f"{what} must be a dict or list with one entry for each of the outputs {', '.join(heads)}.")
    return dict.fromkeys(heads, given)


def _the_one(what: str, given: Any) -> Any:
    """Return what is meant for a model's one output: the thing itself, or all that a list or dict holds."""
    if not isinstance(given, dict | list | tuple):
        return given
    entries = list(given.values()) if isinstance(given, dict) else list(given)
    if len(entries) != 1:
        raise ConfigError(f"{what} has {len(entries)} entries, and the model has one output.")
    return entries[0]


def inputs_for(model: Any, inputs: Any) -> Any:
    """Return `inputs` as a model with a list of inputs wants them: what comes out of tf.data are tuples."""
    listed = isinstance(inputs, tuple) and isinstance(getattr(model, "_inputs_struct", None), list)
    return list(inputs) if listed else inputs
