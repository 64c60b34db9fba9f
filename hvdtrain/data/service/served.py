"""Datasets whose maps run in processes of tf.data service, with the same elements in the same order.

Without sharding a worker gives a whole dataset in its order. So every rank registers its own dataset, of its own
slices, with services of one worker each; several of them take the steps of a rank in turn.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Build = Callable[[tf.data.Dataset], tf.data.Dataset]

no_autograph = tf.autograph.experimental.do_not_convert


def served(numbers: tf.data.Dataset, build: Build, addresses: Sequence[str]) -> tf.data.Dataset:
    """Return `build(numbers)`, an element for each of `numbers`, made by the services in turn."""
    count = len(addresses)
    parts = [distributed(build(numbers.shard(count, place)), address) for place, address in enumerate(addresses)]
    if count == 1:
        return parts[0]
    turns = tf.data.Dataset.range(count).repeat()
    return tf.data.Dataset.choose_from_datasets(parts, turns, stop_on_empty_dataset=True)


def distributed(dataset: tf.data.Dataset, address: str) -> tf.data.Dataset:
    """Return `dataset` as made by the service at `address`, which has one worker."""
    spec = dataset.element_spec
    kept = [place for place, part in enumerate(tf.nest.flatten(spec)) if isinstance(part, tf.TensorSpec)]

    def flat(*element: Any) -> tuple[tf.Tensor, ...]:
        parts = tf.nest.flatten(element if type(spec) is tuple else element[0])
        return tuple(parts[place] for place in kept)

    def packed(*tensors: tf.Tensor) -> Any:
        parts: list[Any] = [None] * len(tf.nest.flatten(spec))
        for place, tensor in zip(kept, tensors, strict=True):
            parts[place] = tensor
        return tf.nest.pack_sequence_as(spec, parts)

    service = tf.data.experimental.service
    # Decoded samples compress badly, and take their time at it.
    off = service.distribute(processing_mode=service.ShardingPolicy.OFF, service=address, compression=None)
    return dataset.map(no_autograph(flat)).apply(off).map(no_autograph(packed))
