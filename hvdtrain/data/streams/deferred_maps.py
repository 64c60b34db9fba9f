"""Moving the maps of a tf.data.Dataset behind what decides its order, so that only the samples kept are mapped.

`source.map(decode).shuffle(n, seed).repeat()` gives the same elements as `source.shuffle(n, seed).repeat().map(decode)`
if `decode` depends on nothing but its element: the order of shuffle, repeat, take and skip does not depend on what the
elements are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import gen_dataset_ops

Function = Callable[[Any], Any]
"""Takes an element as one argument, a nest, and returns another."""

MAPS = frozenset({"_MapDataset", "_ParallelMapDataset"})
PASSING = frozenset({"_PrefetchDataset", "_OptionsDataset"})
"""Datasets that change neither elements nor their order."""
ORDERS = frozenset({"_ShuffleDataset", "_RepeatDataset", "_TakeDataset", "_SkipDataset"})
"""Datasets whose order does not depend on the elements."""
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
    kind = type(dataset).__name__
    if kind == "_ZipDataset":
        return _deferred_zip(dataset, base)
    if kind in MAPS and is_pure(dataset._map_func):
        inner = deferred(dataset._input_dataset, base)
        return Deferred(inner.elements, (*inner.functions, function_of(dataset)))
    if kind in PASSING | ORDERS:
        inner = deferred(dataset._input_dataset, base)
        # Left as it is where nothing is to be moved: a shuffle made anew would begin with its first order again.
        if inner.functions:
            return Deferred(reordered(dataset, inner.elements), inner.functions)
    return Deferred(base(dataset))


def in_place(dataset: tf.data.Dataset, base: Rebase) -> tf.data.Dataset:
    """Return `dataset` made anew on another innermost dataset, with its maps where they were."""
    kind = type(dataset).__name__
    if not deferred(dataset).functions:
        return base(dataset)
    if kind == "_ZipDataset":
        parts = [in_place(part, base) for part in dataset._inputs()]
        return tf.data.Dataset.zip(tf.nest.pack_sequence_as(dataset._datasets, parts))
    inner = in_place(dataset._input_dataset, base)
    return mapped(inner, function_of(dataset)) if kind in MAPS else reordered(dataset, inner)


def _deferred_zip(dataset: tf.data.Dataset, base: Rebase) -> Deferred:
    parts = [deferred(part) for part in dataset._inputs()]
    if not any(part.functions for part in parts):
        return Deferred(base(dataset))
    parts = [deferred(part, base) for part in dataset._inputs()]
    zipped = tf.data.Dataset.zip(tf.nest.pack_sequence_as(dataset._datasets, [part.elements for part in parts]))

    def each(element: Any) -> Any:
        given = _components(dataset._datasets, element)
        made = [part(value) for part, value in zip(parts, given, strict=True)]
        return _packed(dataset._datasets, iter(made))

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


def function_of(dataset: tf.data.Dataset) -> Function:
    """Return the function of a map, traced already."""
    traced, spec = dataset._map_func, dataset._input_dataset.element_spec

    def call(element: Any) -> Any:
        made = traced.function(*structure.to_tensor_list(spec, element))
        made = tf.nest.flatten(made) if made is not None else []
        return structure.from_compatible_tensor_list(traced.output_structure, made)

    return call


def mapped(dataset: tf.data.Dataset, function: Function) -> tf.data.Dataset:
    """Return `dataset` with `function` applied to each element, in parallel and in order."""

    def on_arguments(*parts: Any) -> Any:
        # A NamedTuple comes whole.
        return function(parts if type(dataset.element_spec) is tuple else parts[0])

    call = tf.autograph.experimental.do_not_convert(on_arguments)
    return dataset.map(call, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def reordered(like: tf.data.Dataset, elements: tf.data.Dataset) -> tf.data.Dataset:
    """Return `elements` in the order that `like` gives to its input."""
    kind = type(like).__name__
    if kind == "_ShuffleDataset":
        return _shuffled(like, elements)
    if kind == "_RepeatDataset":
        return elements.repeat(like._count)
    if kind == "_TakeDataset":
        return elements.take(like._count)
    return elements.skip(like._count) if kind == "_SkipDataset" else elements


def _shuffled(like: tf.data.Dataset, elements: tf.data.Dataset) -> tf.data.Dataset:
    """Shuffle with the seeds that `like` was given or has drawn, which `Dataset.shuffle` would draw anew."""
    variant = gen_dataset_ops.shuffle_dataset_v3(
        elements._variant_tensor,
        buffer_size=like._buffer_size,
        seed=like._seed,
        seed2=like._seed2,
        seed_generator=gen_dataset_ops.dummy_seed_generator(),
        reshuffle_each_iteration=like._reshuffle_each_iteration,
        **elements._flat_structure,
    )
    return tf.data.experimental.from_variant(variant, elements.element_spec)


def is_pure(traced: Any) -> bool:
    """Whether a traced function depends on its arguments alone: it draws no random numbers, calls no Python …"""
    graph = traced.function.graph.as_graph_def()
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    return not any(_is_stateful(node.op) for node in nodes)


def _is_stateful(op: str) -> bool:
    definition = op_def_registry.get(op)
    return definition is not None and definition.is_stateful and op not in HARMLESS
