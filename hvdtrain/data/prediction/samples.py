"""Samples to predict: a source whose targets are placeholders, and what each sample is called in the results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.source import Source

Finish = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class PredictionSamples:
    """Samples to predict, in order."""

    source: Source
    """Inputs as they were given, with zeros for targets."""
    finish: Finish | None
    """Turns a batch of them into inputs of the model; see `DataSplits.finish`."""
    id_name: str
    """What identifies a sample: `path`, or `row`, which counts from 0."""
    identify: Callable[[int], str | int]
    """Returns the identity of a sample, by its number."""


def rows_of(inputs: Any, count: int, name: str, finish: Finish | None = None) -> PredictionSamples:
    """Return samples that are rows of arrays.

    Args:
        inputs: arrays [count, …], or a nest of them.
        count: number of samples.
        name: their name in messages.
        finish: see `PredictionSamples`.
    """
    source = ArraySource((inputs, np.zeros(count, np.int32)), name)
    return PredictionSamples(source, finish, "row", lambda number: number)


def inputs_of(samples: PredictionSamples) -> Any:
    """Return the inputs of the model for all `samples`, as arrays."""
    elements = samples.source.gather(tf.range(samples.source.size, dtype=tf.int64))
    if samples.finish is not None:
        elements = samples.finish(*elements)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), elements[0])
