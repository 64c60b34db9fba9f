"""Check that targets fit a model's outputs and loss: a label out of range would be NaN on a GPU, and no error."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.source import DataSplits, Source, batch_spec

Shape = tuple[int | None, ...]
Kind = Literal["labels", "elements", "either", "unknown"]


def check_shapes(model: keras.Model, splits: DataSplits, loss: Any = None) -> None:
    """Refuse targets that do not fit the outputs of `model`, as far as both are known.

    A model that its first batch will build has no known shapes yet: nothing is checked. Inputs are checked by Keras.

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
    targets = getattr(source, "elements", batch_spec(source))[1]
    try:
        tensors = list(getattr(model, "outputs", None) or [])
    except ValueError:  # a Sequential that has not seen a batch
        return
    if not tensors:  # a pipeline stage
        return
    names = getattr(model, "output_names", None) or [""] * len(tensors)
    specs = {name: tuple(tensor.shape) for name, tensor in zip(names, tensors, strict=True)}
    for output, array in _paired(specs, targets):
        one, known = _loss_of(loss, list(specs), output)
        if known:
            label = f" {output!r}" if len(specs) > 1 else ""
            check_targets(array, specs[output], one, source=source.name, output=label)


def _paired(specs: dict[str, Shape], arrays: Any) -> Iterator[tuple[str, tf.Tensor]]:
    """Pair the model's outputs with arrays: by name if the data have names, else in order."""
    flat = tf.nest.flatten(arrays)
    if isinstance(arrays, dict) and not len(specs) == len(flat) == 1:
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


def check_targets(
    array: tf.Tensor | tf.TensorSpec, output_shape: Shape, loss: Any, *, source: str, output: str
) -> None:
    """Refuse labels out of range, or targets of another shape than the output.

    Args:
        array: the targets [samples, …], or their TensorSpec.
        output_shape: the output's shape, with None for samples.
        loss: the loss of this output; None if unknown.
        source: the name of the data in messages.
        output: the name of the output in messages; "" for the only one.

    Raises:
        DataError: names the labels out of range, or both shapes.
    """
    kind, shape = target_kind(loss), tuple(array.shape)
    if kind == "unknown":
        return
    if kind != "elements" and _are_labels(array, output_shape):
        if isinstance(array, tf.Tensor):
            check_labels(
                array.numpy(), output_shape[-1], getattr(loss, "ignore_class", None), source=source, output=output
            )
        shape = (*shape[: len(output_shape) - 1], output_shape[-1])
    if not _alike(output_shape, shape):
        raise DataError(
            f"The model gives outputs{output} of shape {output_shape}; the targets of {source} are "
            f"{(None, *array.shape[1:])}, which the loss cannot compare."
        )


def check_labels(labels: np.ndarray, outputs: int | None, ignored: int | None, *, source: str, output: str) -> None:
    """Refuse labels outside [0, outputs), except the one that the loss ignores.

    Raises:
        DataError: names the lowest or highest label.
    """
    counted = labels if ignored is None else labels[labels != ignored]
    lowest, highest = (int(counted.min()), int(counted.max())) if counted.size else (0, 0)
    if lowest < 0:
        raise DataError(f"The labels of {source} must count from 0. Received: {lowest}.")
    if outputs is not None and highest >= outputs:
        raise DataError(
            f"The labels of {source} reach {highest}, the model has {outputs} outputs{output}: labels count from 0, so "
            f"it needs {highest + 1}."
        )


def target_kind(loss: Any) -> Kind:
    """Return the kind of targets a loss takes: labels, values shaped like the outputs, or unknown."""
    if loss is None:
        return "either"
    loss = loss.func if isinstance(loss, functools.partial) else loss
    loss = _by_name(loss) if isinstance(loss, str) else loss
    kind = type(loss) if isinstance(loss, keras.losses.Loss) else loss
    name = getattr(kind, "__name__", "").lower().replace("_", "")
    if not getattr(kind, "__module__", "").startswith("keras.") or name == "ctc":
        return "unknown"
    return "labels" if name == "sparsecategoricalcrossentropy" else "elements"


def _by_name(name: str) -> Any:
    try:
        return keras.losses.get(name)
    except ValueError:
        return None  # the trainer refuses it


def _are_labels(array: tf.Tensor | tf.TensorSpec, output_shape: Shape) -> bool:
    """Return whether targets are integer labels [samples, …] or [samples, …, 1] for outputs [samples, …, classes]."""
    if not array.dtype.is_integer or (output_shape[-1] or 0) < 2:
        return False
    rank = array.shape.rank
    return rank == len(output_shape) - 1 or (rank == len(output_shape) and array.shape[-1] == 1)


def _alike(output_shape: Shape, shape: Iterable[int | None]) -> bool:
    """Return whether losses accept the two shapes: they add or remove a last dim, and broadcast dims of 1."""
    actual = tuple(shape)
    if len(actual) != len(output_shape):
        return abs(len(actual) - len(output_shape)) == 1
    return all(a == b or None in (a, b) or 1 in (a, b) for a, b in zip(output_shape[1:], actual[1:], strict=True))
