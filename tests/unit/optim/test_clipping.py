"""The sum of squares, in blocks that one thread sums."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.optim.clipping import SUMMED_AT_ONCE, square_sum, sum_of_squares

BLOCK = SUMMED_AT_ONCE


@pytest.mark.parametrize("elements", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, BLOCK**2, BLOCK**2 + BLOCK + 1])
def test_squares_are_summed_alike_whether_their_number_is_known_to_the_trace(elements):
    values = np.random.default_rng(0).normal(size=elements).astype("float32")
    known, unknown = (
        tf.function(sum_of_squares, input_signature=[tf.TensorSpec([length])])(values).numpy()
        for length in (elements, None)
    )
    assert known == unknown, "to the last bit: ranks may know different shapes"
    assert known == pytest.approx(np.square(values.astype("float64")).sum(), rel=1e-6)


def test_a_variable_of_a_model_takes_few_operations():
    """A model has hundreds; each operation is traced, and run in measured steps."""

    @tf.function(autograph=False)
    def norm(gradient):
        return square_sum([gradient])

    operations = norm.get_concrete_function(tf.TensorSpec([3, 3, 128, 100])).graph.get_operations()
    assert len([each for each in operations if each.type not in {"Const", "Placeholder", "Identity"}]) <= 12
