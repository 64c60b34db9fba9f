"""Slices of initial values are those of Keras' initializer for the whole."""

import itertools

import keras
import numpy as np
import pytest

from hvdtrain.layers import slices
from hvdtrain.layers.slices import uniform_slice
from hvdtrain.runtime.placement import even_slice


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape", [(11, 3), (5, 7, 3), (13,)])
def test_a_slice_is_that_of_the_whole(dtype, shape, monkeypatch):
    monkeypatch.setattr(slices, "_AT_ONCE", 10)
    whole = np.array(keras.initializers.RandomUniform(-0.3, 0.3, seed=77)(shape, dtype=dtype))
    for cuts in itertools.product([(1, 0), (3, 1), (3, 2)], repeat=len(shape)):
        box = tuple(even_slice(size, *cut) for size, cut in zip(shape, cuts, strict=True))
        part = uniform_slice(shape, box, seed=77, bound=0.3, dtype=dtype)
        assert part.dtype == dtype
        np.testing.assert_array_equal(part, whole[box])


def test_slices_follow_one_another():
    slices = [even_slice(11, 4, index) for index in range(4)]
    assert [(part.start, part.stop) for part in slices] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert even_slice(2, 4, 3) == slice(2, 2)
