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


def gradients_of(shapes, dtypes=("float32",)):
    rng = np.random.default_rng(0)
    return [tf.constant(rng.normal(size=shape), dtypes[n % len(dtypes)]) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("shapes", [[[3]], [[5, 7], [], [0], [4096], [3, 1000]], [[2, 4096], [5000], [64]] * 7])
def test_the_sum_over_all_gradients_is_that_of_each(shapes):
    gradients = gradients_of(shapes, ["float32", "float64", "bfloat16", "float16"])
    rows = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([0, 5]), tf.constant([9, 2]))
    expected = 30.0 + sum(np.square(each.numpy().astype("float64")).sum() for each in gradients)
    assert square_sum([None, rows, *gradients]).numpy() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("shapes", "most"),
    [([[3, 3, 128, 100]], 14), ([[64]] * 100, 14), ([[3, 3]] * 100, 114), ([[3, 3, 64, 64]] * 100, 310)],
)
def test_a_variable_of_a_model_takes_few_operations(shapes, most):
    """A model has hundreds; each operation is traced, and run in measured steps."""
    norm = tf.function(lambda *gradients: square_sum(gradients), autograph=False)
    operations = norm.get_concrete_function(*map(tf.TensorSpec, shapes)).graph.get_operations()
    assert len([each for each in operations if each.type not in {"Const", "Placeholder", "Identity"}]) <= most
