"""Check that data fit the model, before a compiled step fails with a page of its own."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.source import Source, batch_spec
from hvdtrain.data.splits import DataSplits
from hvdtrain.data.targets import Shape, check_targets


def check_shapes(model: keras.Model, splits: DataSplits, loss: Any = None) -> None:
    """Refuse data that do not fit the inputs and outputs of `model`, as far as both are known.

    A model that its first batch will build has no known shapes yet: nothing is checked.

    Args:
        model: the model, its variables built or not.
        splits: the data; training and validation are checked.
        loss: the training loss, or a dict or list of them; None if unknown.

    Raises:
        DataError: names the shapes, or the labels and outputs, that do not match.
    """
    for source in (splits.train, splits.validation):
        check_source(model, source, loss)


def check_source(model: keras.Model, source: Source, loss: Any = None) -> None:
    """Check the training or the validation samples alone; see `check_shapes`."""
    # Values are checked for samples in memory, shapes for all.
    inputs, targets = getattr(source, "elements", batch_spec(source))[:2]
    _check_inputs(_inputs(model), inputs, source.name)
    specs = _outputs(model)
    for output, array in _paired(specs, targets):
        one, known = _loss_of(loss, list(specs), output)
        if known:
            check_targets(array, specs[output], one, source=source.name, output=_label(specs, output))


def _inputs(model: keras.Model) -> dict[str, Shape]:
    """Return the input shapes of a Functional model by name; {} for others."""
    return {tensor.name: tuple(tensor.shape) for tensor in _tensors(model, "inputs")}


def _outputs(model: keras.Model) -> dict[str, Shape]:
    """Return the output shapes of a Functional model by name; {} for others."""
    tensors = _tensors(model, "outputs")
    names = getattr(model, "output_names", None) or [""] * len(tensors)
    return {name: tuple(tensor.shape) for name, tensor in zip(names, tensors, strict=True)}


def _tensors(model: keras.Model, side: str) -> list[Any]:
    try:
        return list(getattr(model, side, None) or [])
    except ValueError:  # a Sequential that has not seen a batch
        return []


def _check_inputs(specs: dict[str, Shape], arrays: Any, source: str) -> None:
    flat = tf.nest.flatten(arrays)
    pairs = list(_paired(specs, arrays))
    if specs and not len(pairs) == len(flat) == len(specs):
        has = _listed(arrays) if isinstance(arrays, dict) else f"{len(flat)} without names"
        raise DataError(f"The model has the inputs {_listed(specs)}; {source} has {has}. See --model and --data.")
    for name, array in pairs:
        if not _accepts(specs[name], array.shape):
            raise DataError(
                f"The model takes inputs{_label(specs, name)} of shape {specs[name]}; the inputs of {source} are "
                f"{(None, *array.shape[1:])}. See --model and --data."
            )


def _paired(specs: dict[str, Shape], arrays: Any) -> Iterator[tuple[str, tf.Tensor]]:
    """Pair the model's tensors with arrays: by name if the data have names, else in order."""
    flat = tf.nest.flatten(arrays)
    if len(specs) == len(flat) == 1:
        yield next(iter(specs)), flat[0]
    elif isinstance(arrays, dict):
        yield from ((name, array) for name, array in arrays.items() if name in specs)
    elif len(specs) == len(flat):
        yield from zip(specs, flat, strict=True)


def _loss_of(loss: Any, outputs: list[str], output: str) -> tuple[Any, bool]:
    """Return the loss of an output, and whether it has one."""
    if isinstance(loss, dict):
        return loss.get(output), loss.get(output) is not None
    if isinstance(loss, list | tuple):
        one = loss[outputs.index(output)] if len(loss) == len(outputs) else None
        return one, one is not None
    return loss, True


def _accepts(expected: Shape, shape: Iterable[int]) -> bool:
    """Whether Keras accepts an array of `shape` for an input: it adds or removes a last dim of 1."""
    actual = tuple(shape)
    return (
        _matches(expected, actual)
        or (expected[-1] == 1 and _matches(expected[:-1], actual))
        or (actual[-1] == 1 and _matches(expected, actual[:-1]))
    )


def _matches(expected: Shape, actual: tuple[int, ...]) -> bool:
    """Compare shapes without the first dim, which counts samples; None matches any size."""
    return len(expected) == len(actual) and all(a in (None, b) for a, b in zip(expected[1:], actual[1:], strict=True))


def _label(specs: dict[str, Shape], name: str) -> str:
    return f" {name!r}" if len(specs) > 1 else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
