"""What is said of data and options that may be meant otherwise."""

import pytest
import tensorflow as tf

from hvdtrain.training.advice import about_views


def inputs(*shape):
    return tf.TensorSpec(shape, tf.float32)


def test_two_views_along_dim_0_are_named():
    found = about_views(inputs(1, 16, 5), replicas=2)
    assert "of 2, this replica has 1, of shape (16, 5)" in found
    assert "((first, second),)" in found
    assert about_views((inputs(1, 16, 5), inputs(1, 16, 32, 32, 3)), replicas=2)


@pytest.mark.parametrize(
    ("given", "replicas"),
    [
        (inputs(2, 16, 5), 1),  # whole
        (inputs(16, 16, 5), 2),
        (inputs(1, 3, 5), 2),
        (inputs(1, 16), 2),
        (inputs(None, 16, 5), 2),
        ((inputs(1, 16, 5), inputs(1, 5)), 2),
    ],
)
def test_samples_are_not_taken_for_views(given, replicas):
    assert not about_views(given, replicas)
