"""Training and validation samples of arrays, where there may be none for validation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.subset import hold_out


def array_parts(
    elements: tuple[Any, ...], given: tuple[Any, ...] | None, *, validation: int, name: str
) -> tuple[ArraySource, ArraySource]:
    """Return training and validation samples.

    Args:
        elements: `(inputs, targets[, sample_weight])` arrays.
        given: the same for validation; None where there are none.
        validation: samples of `elements` to hold out where nothing is given; 0: one of ten.
        name: what messages call them.

    Raises:
        ConfigError: `validation` where samples for it are given.
        DataError: arrays that cannot be used, or samples of both that differ in shape.
    """
    if given is not None:
        if validation:
            raise ConfigError(f"{name} has samples for validation: leave out --data-args validation.")
        train, held = ArraySource(elements, f"{name} (training)"), ArraySource(given, f"{name} (validation)")
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
    """Return the numbers of the training and of the validation samples among `size`, always the same ones.

    Args:
        size: samples.
        validation: how many to hold out; 0: one of ten.
        labels: [samples] labels, of which each part gets its share; None: drawn from all alike.
        name: what messages call the samples.

    Raises:
        DataError: nothing would be left of one part.
    """
    numbers = np.arange(size)
    parts = hold_out(ArraySource((numbers, numbers), name), validation, labels)
    train, held = (part.gather(tf.range(part.size))[0].numpy() for part in parts)
    return train, held


def is_labels(targets: Any) -> bool:
    """Tell integer labels [samples] from other targets."""
    return isinstance(targets, np.ndarray) and targets.ndim == 1 and np.issubdtype(targets.dtype, np.integer)


def check_range(labels: np.ndarray, classes: int, describe: Callable[[int], str]) -> None:
    """Refuse labels [samples] outside of [0, classes).

    Args:
        labels: the labels.
        classes: their number.
        describe: says where a sample comes from.

    Raises:
        DataError: naming the first such label, and its place.
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
    """Return shape and type of each tensor of a sample, but not of its weight."""
    return tf.nest.map_structure(lambda spec: f"{spec.dtype.name} {list(spec.shape)}", source.spec[:2])
