"""Whether targets fit a model's outputs, as far as the loss tells what it takes."""

import functools
from collections.abc import Iterable
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError

Shape = tuple[int | None, ...]
Kind = Literal["labels", "elements", "either", "unknown"]


def check_targets(array: tf.Tensor | tf.TensorSpec, gives: Shape, loss: Any, *, source: str, output: str) -> None:
    """Refuse targets that are no labels of an output, or elements of another shape.

    Args:
        array: the targets [samples, …], or what is known of them.
        gives: shape of the model's output, the first dim None.
        loss: what compares the two; None where it is not known.
        source: what messages call the data.
        output: what they call the output: "" for the only one.

    Raises:
        DataError: labels beyond the outputs, or both shapes.
    """
    kind, shape = target_kind(loss), tuple(array.shape)
    if kind == "unknown":
        return
    if kind != "elements" and _are_labels(array, gives):
        if isinstance(array, tf.Tensor):
            check_labels(array.numpy(), gives[-1], getattr(loss, "ignore_class", None), source=source, output=output)
        shape = (*shape[: len(gives) - 1], gives[-1])
    if not _alike(gives, shape):
        raise DataError(
            f"The model gives outputs{output} of shape {gives}; the targets of {source} are "
            f"{(None, *array.shape[1:])}. See --model, --loss and --data."
        )


def check_labels(labels: np.ndarray, outputs: int | None, ignored: int | None, *, source: str, output: str) -> None:
    """Refuse labels outside of [0, outputs), but for the one that the loss ignores.

    Raises:
        DataError: naming the lowest or highest label.
    """
    counted = labels if ignored is None else labels[labels != ignored]
    lowest, highest = (int(counted.min()), int(counted.max())) if counted.size else (0, 0)
    if lowest < 0:
        raise DataError(f"The labels of {source} must count from 0. Received: {lowest}.")
    if outputs is not None and highest >= outputs:
        raise DataError(
            f"The labels of {source} reach {highest}, the model has {outputs} outputs{output}: labels count from 0, so "
            f"it needs {highest + 1}. See --model-args and --data."
        )


def target_kind(loss: Any) -> Kind:
    """Tell what targets a loss is for: labels, elements like the outputs', or what only its author knows."""
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


def _are_labels(array: tf.Tensor | tf.TensorSpec, gives: Shape) -> bool:
    """Tell integer labels, [samples, …] or [samples, …, 1], of outputs [samples, …, classes]."""
    if not array.dtype.is_integer or (gives[-1] or 0) < 2:
        return False
    rank = array.shape.rank
    return rank == len(gives) - 1 or (rank == len(gives) and array.shape[-1] == 1)


def _alike(gives: Shape, shape: Iterable[int | None]) -> bool:
    """Tell whether losses may compare the two; they add or take away a last dim, and stretch dims of 1."""
    given = tuple(shape)
    if len(given) != len(gives):
        return abs(len(given) - len(gives)) == 1
    return all(a == b or None in (a, b) or 1 in (a, b) for a, b in zip(gives[1:], given[1:], strict=True))
