"""Several batches in one call of a compiled function: `steps_per_execution` of Keras' `compile`."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any

import tensorflow as tf

from hvdtrain.data.batch import Batch, samples_in
from hvdtrain.training.step.graph_cache import kind_of


def kind_of_steps(batch: Batch) -> Hashable | None:
    """Return what batches must have in common to be computed in one loop; None for one that is computed by itself.

    Ragged and sparse tensors do not stack, and a batch without samples is one for which the step is traced anew.
    """
    leaves = tf.nest.flatten(batch[:3])
    if not all(leaf is None or isinstance(leaf, tf.Tensor) for leaf in leaves) or samples_in(batch).shape[0] == 0:
        return None
    return kind_of(batch[:3]), tuple(kind_of(each) if isinstance(each, tf.Tensor) else each for each in batch[3:])


def of_one_kind(batches: Sequence[Batch]) -> Iterator[Sequence[Batch]]:
    """Yield the batches in their order, those of one kind that follow one another together."""
    if len(batches) == 1:  # nothing to compare, in most evaluations
        yield batches
        return
    for kind, group in groupby(batches, kind_of_steps):
        alike = list(group)
        yield from ([each] for each in alike) if kind is None else [alike]


class Loop:
    """A compiled loop over batches of one kind.

    Args:
        step: a compiled function of a batch, which is traced for the loop.
        like: a batch of that kind.
    """

    def __init__(self, step: Callable[[Batch], Any], like: Batch) -> None:
        self._loop = _looped(step, like)

    @property
    def graph(self) -> Any:
        """The graph of the loop."""
        return self._loop.graph

    def __call__(self, batches: Sequence[Batch]) -> Any:
        """Return the results of the step on each batch, in its structure, along a new first dim."""
        columns = zip(*map(_tensors_of, batches), strict=True)
        return self._loop([tf.stack(column) for column in columns])


def _looped(step: Callable[[Batch], Any], like: Batch) -> Any:
    """Return a concrete function of the batches' tensors [steps, …]."""
    leaves = tf.nest.flatten(like)
    examples = _tensors_of(like)

    def step_on(*tensors: Any) -> Any:
        given = iter(tensors)
        return step(
            tf.nest.pack_sequence_as(like, [next(given) if isinstance(leaf, tf.Tensor) else leaf for leaf in leaves])
        )

    alone = tf.function(step_on, autograph=False).get_concrete_function(*examples)
    results = alone.structured_outputs
    flat = [each for each in tf.nest.flatten(results) if each is not None]

    def run(stacked: list[tf.Tensor]) -> Any:
        steps = tf.shape(stacked[0])[0]

        def body(number: tf.Tensor, *found: tf.TensorArray) -> tuple[Any, ...]:
            mine = [
                tf.ensure_shape(each[number], example.shape) for each, example in zip(stacked, examples, strict=True)
            ]
            made = [each for each in tf.nest.flatten(alone(*mine)) if each is not None]
            return number + 1, *(array.write(number, value) for array, value in zip(found, made, strict=True))

        arrays = [tf.TensorArray(each.dtype, steps, element_shape=each.shape) for each in flat]
        # In turn: a step begins with the weights that the one before has left.
        _, *arrays = tf.while_loop(lambda number, *_: number < steps, body, (0, *arrays), parallel_iterations=1)
        rows = iter(arrays)
        return tf.nest.map_structure(lambda each: None if each is None else next(rows).stack(), results)

    specs = [tf.TensorSpec([None, *each.shape], each.dtype) for each in examples]
    return tf.function(run, autograph=False).get_concrete_function(specs)


def _tensors_of(batch: Batch) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)]
