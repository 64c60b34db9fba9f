"""Moving the maps of a tf.data.Dataset behind what decides its order, so that only the samples kept are mapped.

`source.map(decode).shuffle(n, seed).repeat()` gives the same elements as `source.shuffle(n, seed).repeat().map(decode)`
if `decode` depends on nothing but its element: the order of shuffle, repeat, take and skip does not depend on what the
elements are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.compat.tensorflow import (
    MAPS,
    ORDERS,
    PASSING,
    ZIPS,
    function_of_map,
    input_of,
    inputs_of,
    is_kind,
    is_stateful_op,
    ops_of_map,
    reordered,
    zipped_nest,
)

Function = Callable[[Any], Any]
"""Takes an element as one argument, a nest, and returns another."""

HARMLESS = frozenset({"Assert", "If", "While", "StatefulPartitionedCall"})
"""Stateful ops that do not make a function depend on anything but its arguments; called functions are looked at too."""


@dataclass(frozen=True)
class Deferred:
    """A dataset as elements in their order, and the functions that are to be applied to each."""

    elements: tf.data.Dataset
    functions: tuple[Function, ...] = ()

    def __call__(self, element: Any) -> Any:
        """Return what the dataset makes of one of `elements`."""
        for function in self.functions:
            element = function(element)
        return element


Rebase = Callable[[tf.data.Dataset], tf.data.Dataset]


def deferred(dataset: tf.data.Dataset, base: Rebase = lambda found: found) -> Deferred:
    """Take the maps off `dataset` that can come last.

    Args:
        dataset: any dataset.
        base: replaces the innermost dataset, below all maps; by default it stays.
    """
    if is_kind(dataset, ZIPS):
        return _deferred_zip(dataset, base)
    if is_kind(dataset, MAPS) and is_pure(dataset):
        inner = deferred(input_of(dataset), base)
        return Deferred(inner.elements, (*inner.functions, function_of_map(dataset)))
    if is_kind(dataset, PASSING | ORDERS):
        inner = deferred(input_of(dataset), base)
        # Left as it is where nothing is to be moved: a shuffle made anew would begin with its first order again.
        if inner.functions:
            return Deferred(reordered(dataset, inner.elements), inner.functions)
    return Deferred(base(dataset))


def in_place(dataset: tf.data.Dataset, base: Rebase) -> tf.data.Dataset:
    """Return `dataset` made anew on another innermost dataset, with its maps where they were."""
    if not deferred(dataset).functions:
        return base(dataset)
    if is_kind(dataset, ZIPS):
        parts = [in_place(part, base) for part in inputs_of(dataset)]
        return tf.data.Dataset.zip(tf.nest.pack_sequence_as(zipped_nest(dataset), parts))
    inner = in_place(input_of(dataset), base)
    return mapped(inner, function_of_map(dataset)) if is_kind(dataset, MAPS) else reordered(dataset, inner)


def _deferred_zip(dataset: tf.data.Dataset, base: Rebase) -> Deferred:
    parts = [deferred(part) for part in inputs_of(dataset)]
    if not any(part.functions for part in parts):
        return Deferred(base(dataset))
    parts = [deferred(part, base) for part in inputs_of(dataset)]
    zipped = tf.data.Dataset.zip(tf.nest.pack_sequence_as(zipped_nest(dataset), [part.elements for part in parts]))

    def each(element: Any) -> Any:
        given = _components(zipped_nest(dataset), element)
        made = [part(value) for part, value in zip(parts, given, strict=True)]
        return _packed(zipped_nest(dataset), iter(made))

    return Deferred(zipped, (each,))


def _components(datasets: Any, element: Any) -> list[Any]:
    """Return the elements of the zipped `datasets`, a nest, in the order of `tf.nest.flatten`."""
    if isinstance(datasets, dict):
        return [part for key in sorted(datasets) for part in _components(datasets[key], element[key])]
    if isinstance(datasets, tuple):
        return [part for one, value in zip(datasets, element, strict=True) for part in _components(one, value)]
    return [element]


def _packed(datasets: Any, elements: Iterator[Any]) -> Any:
    """Return `elements` in the nest of `datasets`."""
    if isinstance(datasets, dict):
        made = {key: _packed(datasets[key], elements) for key in sorted(datasets)}
        return {key: made[key] for key in datasets}
    if isinstance(datasets, tuple):
        return tuple(_packed(one, elements) for one in datasets)
    return next(elements)


def mapped(dataset: tf.data.Dataset, function: Function) -> tf.data.Dataset:
    """Return `dataset` with `function` applied to each element, in parallel and in order."""

    def on_arguments(*parts: Any) -> Any:
        # A NamedTuple comes whole.
        return function(parts if type(dataset.element_spec) is tuple else parts[0])

    call = tf.autograph.experimental.do_not_convert(on_arguments)
    return dataset.map(call, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def is_pure(dataset: tf.data.Dataset) -> bool:
    """Whether the function of a map depends on its arguments alone: it draws no random numbers, calls no Python …"""
    return not any(is_stateful_op(op) for op in ops_of_map(dataset) - HARMLESS)
