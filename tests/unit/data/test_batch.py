"""Shapes of the samples of all replicas, of which a replica has a slice."""

import numpy as np
import tensorflow as tf

from hvdtrain.data.batch import Batch, as_batch, specs_of_all


def shapes(batch: Batch) -> list[list[int]]:
    return [spec.shape.as_list() for spec in tf.nest.flatten((batch.inputs, batch.targets)) if spec is not None]


def test_samples_of_all_replicas_have_the_shapes_of_the_batch():
    mine = as_batch(({"a": tf.zeros([3, 2]), "b": np.zeros([3], "int32")}, tf.zeros([3, 4, 5])), 1.0, 7)
    specs = specs_of_all(mine)
    assert shapes(specs) == [[7, 2], [7], [7, 4, 5]]
    assert [each.dtype for each in tf.nest.flatten(specs.inputs)] == [tf.float32, tf.int32]
    assert specs.sample_weight is None
    assert shapes(specs_of_all(mine, 2)) == [[4, 2], [4], [4, 4, 5]]


def test_a_placeholder_is_no_sample_of_them():
    assert shapes(specs_of_all(as_batch(tf.zeros([1, 2]), 0.0, 3))) == [[3, 2]]


def test_a_batch_without_samples_stays_one():
    assert shapes(specs_of_all(as_batch((tf.zeros([0, 2]), tf.zeros([0])), 1.0, 0))) == [[0, 2], [0]]


def test_zipped_datasets_keep_their_lengths():
    zipped = as_batch((tf.zeros([2, 5]), (tf.zeros([4, 5]), tf.zeros([4]))), 1.0, 8)
    assert shapes(specs_of_all(zipped)) == [[4, 5], [8, 5], [8]]
