"""Convert Keras variables to the tf.Variables they wrap; name them, and free their memory."""

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import tensorflow as tf

from hvdtrain.compat.tensorflow import unique_id
from hvdtrain.runtime.guarded import kept

F = TypeVar("F", bound=Callable[..., Any])
_NUMBER = re.compile(r"_(\d+)(?=_|$)")


def as_written(function: F) -> F:
    """Exempt `function` and its callees from a user's AutoGraph."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


def unwrap(variable: Any) -> tf.Variable:
    """Return the tf.Variable of a Keras 3 variable, or `variable` itself."""
    if isinstance(variable, tf.Variable):
        return variable
    from hvdtrain.compat.keras_variables import tensor_of  # a script of Keras 2 does without Keras 3

    tensor = tensor_of(variable)
    # Not `value` first: a read may be computed, gathered or refused.
    if not isinstance(tensor, tf.Variable):
        tensor = getattr(variable, "value", None)
    if isinstance(tensor, tf.Variable):
        return tensor
    raise TypeError(f"A Keras or TensorFlow variable is needed. Received: {type(variable).__name__}.")


@contextmanager
def restoring(variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Restore the values of `variables` after the context, whatever happens in it."""
    before = [(variable, variable.numpy()) for variable in variables]  # a strategy's variables are no arrays
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


@contextmanager
def warning_of_adapted(variables: Sequence[Any], cure: str, *, stacklevel: int = 1) -> Iterator[None]:
    """Warn if the context changes what Normalization layers have adapted to, of which they compute with a copy.

    In a graph, where values are unknown, warn of all. `cure` is the line to write instead.
    """
    tensors = [unwrap(variable) for variable in variables]
    by_path = dict(zip(map(path_of, variables), tensors, strict=True))
    moments: dict[str, list[tf.Variable]] = {}
    for path, count in by_path.items():
        scope = path.removesuffix("count")
        found = [by_path[name] for name in (f"{scope}mean", f"{scope}variance") if name in by_path]
        if path.split("/")[-1] == "count" and count.dtype.is_integer and len(found) == 2:
            moments[scope.rstrip("/") or "Normalization"] = found
    before = {name: [each.numpy() for each in found] for name, found in moments.items() if tf.executing_eagerly()}
    yield
    changed = [
        name
        for name, found in moments.items()
        if name not in before or any((each.numpy() != old).any() for each, old in zip(found, before[name], strict=True))
    ]
    if changed:
        warnings.warn(
            f"{', '.join(changed)}: what this rank has adapted to was replaced by another rank's, but "
            f"Normalization computes with a copy of its variables, and lookups hold what is no variable. {cure}",
            stacklevel=stacklevel + 3,
        )


def path_of(variable: Any) -> str:
    """Return a Keras variable's path, or a tf.Variable's name without its `:0`."""
    path = getattr(variable, "path", None)
    return str(path) if path else str(variable.name).split(":")[0]


def own_attributes(thing: Any, bookkeeping: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield a layer's or optimizer's attributes alphabetically, ignoring leading underscores."""
    # TensorFlow's own tracking begins with _self_.
    known = {name: value for name, value in vars(thing).items() if not name.startswith("_self_")}
    for name in sorted(known, key=lambda name: (name.lstrip("_"), name)):
        if name not in bookkeeping:
            yield name, known[name]


def unique_paths(sources: Sequence[Any]) -> list[str]:
    """Name each variable by its path without process-dependent numbers; a tensor by its index.

    Keras numbers layers over all models of a process: a rank that has built another model before has `dense_2/kernel`
    where others have `dense/kernel`. The numbers are replaced by their order among `sources`, so both get one name.
    """
    # A Keras variable counts as a tensor.
    named = [not tf.is_tensor(s) or isinstance(s, tf.Variable) or hasattr(s, "path") for s in sources]
    originals = [path_of(s) if is_named else "" for s, is_named in zip(sources, named, strict=True)]
    ranks = _ranks_of_numbers(originals)
    paths: list[str] = []
    for place, original in enumerate(originals):
        path = "/".join(ranks[part] for part in original.split("/")) if named[place] else f"source{place}"
        paths.append(path if path not in paths else f"{path}#{place}")
    return paths


def _ranks_of_numbers(paths: Iterable[str]) -> dict[str, str]:
    """Return each path component's name without number, and its order.

    `dense_7` and `dense_9` become `dense` and `dense_1`, as do `dense` and `dense_2`.
    """
    by_words: dict[str, set[str]] = {}
    for part in {part for path in paths for part in path.split("/")}:
        by_words.setdefault(_NUMBER.sub("", part), set()).add(part)
    ranks = {}
    for words, parts in by_words.items():
        for order, part in enumerate(sorted(parts, key=lambda part: [int(n) for n in _NUMBER.findall(part)])):
            ranks[part] = f"{words}_{order}" if order else words
    return ranks


def fill_memory(variable: tf.Variable, value: tf.Tensor) -> Any:
    """Assign `value`, also after `free_memory`; return the operation within a graph."""
    # `assign` compares shapes, and a freed variable has another one.
    return _assign(variable, tf.ensure_shape(value, variable.shape))


def free_memory(variable: tf.Variable) -> Any:
    """Free a variable's memory, keeping its shape; return the operation within a graph."""
    # The shape of the assigned value must be hidden from the graph and from Grappler, which assumes that a variable
    # and its assigned value have the same shape, and so have input and output of a PlaceholderWithDefault: with zeros
    # through one, all freed variables seemed to have the same shape, and it removed a reshape of a read value.
    no_elements = tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([1], tf.int32), shape=[None])
    nothing = tf.raw_ops.Fill(dims=no_elements, value=tf.zeros([], variable.dtype))
    return _assign(variable, kept(nothing, unique_id(variable)))


def _assign(variable: tf.Variable, value: tf.Tensor) -> Any:
    return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value, validate_shape=False)
