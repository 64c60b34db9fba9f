"""Import user code named PACKAGE.MODULE:ATTRIBUTE; its own exceptions propagate."""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.registry import check_type, suggestion


def is_user_code(name: str) -> bool:
    """Return whether `name` refers to a user's code, not to a built-in."""
    return ":" in name


def load_attribute(option: str, name: str) -> Any:
    """Import MODULE:ATTRIBUTE, searching the working folder first. Raises ConfigError if malformed or missing."""
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise ConfigError(f"{option} takes PACKAGE.MODULE:ATTRIBUTE, with dots and no .py. Received: {name!r}.")
    module = _import(option, module_name)
    if not hasattr(module, attribute):
        public = {known: "" for known in vars(module) if not known.startswith("_")}
        where = getattr(module, "__file__", None) or "which has no file"
        raise ConfigError(
            f"{option} {name}: the module {module_name} ({where}) has no {attribute!r}.{suggestion(attribute, public)}"
        )
    return getattr(module, attribute)


def load_function(option: str, name: str) -> Callable[..., Any]:
    """Import the function or class MODULE:FUNCTION. Raises ConfigError if missing or not callable."""
    function = load_attribute(option, name)
    if not callable(function):
        raise ConfigError(f"{option} {name} must be a function. Received: a {type(function).__name__}.")
    return function


def arguments_for(
    option: str, name: str, function: Callable[..., Any], offered: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Select keyword arguments for `function` from `offered`, overridden by `given`.

    `option` names the function, and `option`-args sets its arguments; offered values may be None if unknown. Raises
    ConfigError for required parameters without a value, or arguments that are not accepted.
    """
    parameters = _parameters(function)
    by_name = {key: p for key, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    for key, value in given.items():
        if key in by_name:
            check_type(f"argument {key!r} of {option} {name}", value, by_name[key].default)
        elif not takes_any:
            known = dict.fromkeys(by_name, "")
            raise ConfigError(f"{option} {name} takes no argument {key!r}.{suggestion(key, known)}")
    arguments = {key: value for key, value in offered.items() if key in by_name and value is not None} | dict(given)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [key for key, p in parameters.items() if p.default is p.empty and p.kind not in several]
    missing = [key for key in required if key not in arguments or key not in by_name]
    if missing:
        raise ConfigError(_unfilled(option, name=name, function=function, offered=offered, missing=missing))
    return arguments


def import_from(folder: Path) -> None:
    """Search modules in `folder` first, then in the working folder."""
    _search_working_folder()
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))


def _search_working_folder() -> str:
    """Add the working folder to sys.path, like `python -m`; return it."""
    folder = os.getcwd()
    if "" not in sys.path and folder not in sys.path:
        sys.path.insert(0, folder)
    return folder


def _import(option: str, module_name: str) -> Any:
    folder = _search_working_folder()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing import inside the user's module shows the user's own traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{option} {module_name}:…: there is no module {error.name!r}. Modules are searched {_first(folder)}from "
            f"the working folder, {folder}, and in the environment.{_neighbour(error.name, folder)}"
        ) from None


def _first(folder: str) -> str:
    first = sys.path[0] if sys.path else ""
    return f"from {first}, " if first not in ("", folder) and os.path.isdir(first) else ""


def _neighbour(module_name: str, folder: str) -> str:
    parent, _, last = module_name.rpartition(".")
    places = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else [folder]
    found = {entry.removesuffix(".py") for place in places if os.path.isdir(place) for entry in os.listdir(place)}
    near = difflib.get_close_matches(last, sorted(found), n=1, cutoff=0.5)
    return f" Perhaps you meant: {f'{parent}.' if parent else ''}{near[0]}." if near else ""


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # written in C, without a signature
        return {}


def _unfilled(
    option: str, name: str, function: Callable[..., Any], offered: Mapping[str, Any], missing: list[str]
) -> str:
    unknown = [key for key in missing if key in offered]
    why = f" The data do not specify {', '.join(unknown)}." if unknown else ""
    gives = ", ".join(offered)
    return (
        f"{option} {name} takes {inspect.signature(function)}; {', '.join(missing)} would have no value.{why} "
        f"It is called with those of ({gives}) that it names, and with {option}-args NAME VALUE …."
    )
