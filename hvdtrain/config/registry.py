"""Things by name: static tables of name -> "module:attribute", and optional packages; listing imports nothing."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.config.errors import ConfigError


def suggestion(name: str, known: Mapping[str, str]) -> str:
    """Return " Perhaps you meant: X." for a near miss, else " Available: …", or "" if `known` is empty."""
    if not known:
        return ""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Perhaps you meant: {near[0]}." if near else f" Available: {', '.join(sorted(known))}."


def resolve(kind: str, name: str, table: Mapping[str, str]) -> Any:
    """Import the attribute of `name` in `table` (name -> "module:attribute"). Raises ConfigError with suggestions."""
    if name not in table:
        raise ConfigError(f"Unknown {kind} {name!r}.{suggestion(name, table)}")
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def check_arguments(kind: str, name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Reject unknown arguments, or of another type than the default (ConfigError)."""
    accepted = {
        parameter.name: parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is not inspect.Parameter.empty
    }
    for argument, value in given.items():
        if argument not in accepted:
            names = dict.fromkeys(accepted, "")
            raise ConfigError(f"The {kind} {name!r} takes no argument {argument!r}.{suggestion(argument, names)}")
        check_type(f"argument {argument!r} of the {kind} {name!r}", value, accepted[argument].default)


def check_type(what: str, value: Any, default: Any) -> None:
    """Reject a value whose type differs from its default's (ConfigError); None accepts any type."""
    says_type = default is not None and default is not inspect.Parameter.empty
    if says_type and not _fits(value, default):
        raise ConfigError(f"The {what} must be {type(default).__name__}. Received: {value!r}.")


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    return not isinstance(default, int | str) or isinstance(value, type(default))


def optional_package(module: str, extra: str, need: str) -> Any:
    """Import `module` of an optional package.

    Args:
        module: the module to import.
        extra: the extra of hvdtrain that installs it.
        need: the option that needs it, as the user wrote it.

    Raises:
        ConfigError: it is not installed; names the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is there, and lacks something itself
        raise ConfigError(
            f"{need} needs the package {error.name}, which is not installed: pip install 'hvdtrain[{extra}]'"
        ) from None
