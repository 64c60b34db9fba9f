"""Holding out validation samples where a data set has none."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.subset import hold_out


def array_parts(
    elements: tuple[Any, ...], held_out: tuple[Any, ...] | None, *, validation: int, name: str
) -> tuple[ArraySource, ArraySource]:
    """Return training and validation samples.

    Args:
        elements: `(inputs, targets[, sample_weight])` arrays.
        held_out: the same for validation; None if there are none.
        validation: samples of `elements` to hold out if `held_out` is None; 0: one in ten.
        name: the name of the data in messages.

    Raises:
        ConfigError: both `validation` and `held_out`.
        DataError: unusable arrays, or training and validation samples of different shapes.
    """
    if held_out is not None:
        if validation:
            raise ConfigError(f"{name} has samples for validation: leave out --data-args validation.")
        train, held = ArraySource(elements, f"{name} (training)"), ArraySource(held_out, f"{name} (validation)")
        _check_alike(train, held)
        return train, held
    whole = ArraySource(elements, name)
    labels = elements[1] if is_labels(elements[1]) else None
    numbers = held_out_numbers(whole.size, validation, labels, name)
    train, held = (
        ArraySource(whole.gather(tf.constant(part)), f"{name} ({what})")
        for part, what in zip(numbers, ("training", "validation"), strict=True)
    )
    return train, held


def held_out_numbers(size: int, validation: int, labels: np.ndarray | None, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Split the sample numbers below `size` into training and validation, deterministically.

    Args:
        size: number of samples.
        validation: how many to hold out; 0: one in ten.
        labels: [samples] labels to stratify by; None: no stratification.
        name: the name of the data in messages.

    Raises:
        DataError: one of the two would be empty.
    """
    numbers = np.arange(size)
    parts = hold_out(ArraySource((numbers, numbers), name), validation, labels)
    train, held = (part.gather(tf.range(part.size))[0].numpy() for part in parts)
    return train, held


def is_labels(targets: Any) -> bool:
    """Whether targets are integer labels [samples]."""
    return isinstance(targets, np.ndarray) and targets.ndim == 1 and np.issubdtype(targets.dtype, np.integer)


def check_range(labels: np.ndarray, classes: int, describe: Callable[[int], str]) -> None:
    """Refuse labels [samples] outside [0, classes).

    Args:
        labels: the labels.
        classes: number of classes.
        describe: describes where a sample comes from.

    Raises:
        DataError: names the first such label, and its sample.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{describe(first)}: the label {labels[first]} is not one of {classes} classes, which count from 0."
        )


def _check_alike(train: ArraySource, held: ArraySource) -> None:
    if repr(_kinds(train)) != repr(_kinds(held)):
        raise DataError(
            f"The samples of {train.name} are {_kinds(train)}; those of {held.name} are {_kinds(held)}: "
            "both must be alike."
        )


def _kinds(source: ArraySource) -> Any:
    """Return shapes and dtypes of inputs and targets."""
    return tf.nest.map_structure(lambda spec: f"{spec.dtype.name} {list(spec.shape)}", source.spec[:2])
