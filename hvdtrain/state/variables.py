"""The door at which Keras variables stop: below it everything is a tf.Variable."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import tensorflow as tf

F = TypeVar("F", bound=Callable[..., Any])


def as_written(function: F) -> F:
    """Keep AutoGraph, which a user's `tf.function` brings along, from rewriting `function` and all that it calls."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


def unwrap(variable: Any) -> tf.Variable:
    """Return the tf.Variable under a Keras 3 variable, or `variable` itself if it is one already."""
    if isinstance(variable, tf.Variable):
        return variable
    value = getattr(variable, "value", None)
    if isinstance(value, tf.Variable):
        return value
    raise TypeError(f"A Keras or TensorFlow variable is needed. Received: {type(variable).__name__}.")


def path_of(variable: Any) -> str:
    """Return a Keras variable's path, or a tf.Variable's name without its `:0`."""
    path = getattr(variable, "path", None)
    return str(path) if path else str(variable.name).split(":")[0]


def by_path(variables: Iterable[Any], prefix: str = "") -> dict[str, tf.Variable]:
    """Return the tf.Variables under `variables` by path.

    Layers that a user named alike give several variables one path; the later ones get `#2`, `#3` …
    in the order in which the model lists them, which is the same on every rank.
    """
    named: dict[str, tf.Variable] = {}
    for variable in variables:
        tensor = unwrap(variable)
        path, count = f"{prefix}{path_of(variable)}", 1
        while (key := path if count == 1 else f"{path}#{count}") in named:
            count += 1
        named[key] = tensor
    return named


def unique_paths(sources: Sequence[Any]) -> list[str]:
    """Name each variable by its path, or by its place if it has none (a tensor) or shares it with another."""
    paths: list[str] = []
    for place, source in enumerate(sources):
        # A Keras variable counts as a tensor.
        named = not tf.is_tensor(source) or isinstance(source, tf.Variable) or hasattr(source, "path")
        path = path_of(source) if named else f"source{place}"
        paths.append(path if path not in paths else f"{path}#{place}")
    return paths
