"""Sums of gradients over microbatches, and the memory that they give back."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.gradient_sum import GradientSum
from hvdtrain.state.variables import fill_memory, free_memory
from tests.distributed.world import grappler

SHAPES = ((4, 4), (6, 6), (16,), ())


def variables(dtype="float32"):
    return [tf.Variable(tf.ones(shape, dtype)) for shape in SHAPES]


def flat(tensor):
    """Return a tensor as an exchange sees it: one that is flat must be, whatever Grappler takes its shape for."""
    line = tf.reshape(tensor, [-1])
    return tf.ensure_shape(tf.numpy_function(lambda value: value, [line], line.dtype), line.shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@grappler()
def test_sums_of_a_loop_are_read_and_given_back(dtype):
    trained = variables(dtype)
    sums = GradientSum(trained, give_back=True)

    @tf.function(autograph=False)
    def step(count):
        sums.add([1 * tf.convert_to_tensor(v) for v in trained], first=True)

        def body(number):
            sums.add([2 * tf.convert_to_tensor(v) for v in trained], first=False)
            return (number + 1,)

        tf.while_loop(lambda number: number < count, body, [tf.constant(1)], parallel_iterations=1)
        return [flat(tensor) for tensor in sums.read()]

    for count in (1, 3, 2):
        for shape, total in zip(SHAPES, step(tf.constant(count)), strict=True):
            expected = np.full(int(np.prod(shape)), 2 * count - 1, "float32")
            np.testing.assert_array_equal(tf.cast(total, tf.float32), expected)
        assert [buffer._sum.read_value().shape.num_elements() for buffer in sums._buffers] == [0, 0, 0, 0]


@pytest.mark.parametrize(("give_back", "xla"), [(False, False), (True, False), (False, True)])
def test_a_first_microbatch_that_a_graph_decides_on(give_back, xla):
    trained = variables()
    sums = GradientSum(trained, give_back=give_back)
    add = tf.function(lambda first: sums.add([3 * v for v in trained], first=first), jit_compile=xla, autograph=False)
    for group in (1, 2):
        for number in range(group):
            add(tf.constant(number == 0))
        for shape, total in zip(SHAPES, sums.read(), strict=True):
            np.testing.assert_array_equal(total, np.full(shape, 3 * group, "float32"))


def test_rows_of_sparse_gradients_and_gradients_of_nothing():
    table = tf.Variable(tf.zeros([5, 2]))
    sums = GradientSum([table, tf.Variable(1.0)])
    rows = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([3, 1]), tf.constant([5, 2]))
    for _ in range(2):
        sums.add([rows, None], first=True)
        sums.add([rows, None], first=False)
        of_table, nothing = sums.read()
        assert nothing is None
        np.testing.assert_array_equal(tf.convert_to_tensor(of_table)[:, 0], [0, 2, 0, 2, 0])


def test_without_a_microbatch_there_is_nothing_to_read():
    with pytest.raises(ConfigError, match="add the gradients of a microbatch first"):
        GradientSum(variables()).read()


@grappler()
def test_variables_that_are_freed_in_one_graph_keep_their_shapes_apart():
    """Grappler must not learn from what frees them that all have one shape, and drop reshapes of what was read."""
    held = variables()

    @tf.function(autograph=False)
    def read_and_free(factor):
        for variable in held:
            fill_memory(variable, factor * tf.ones(variable.shape))
        found = [variable.read_value() for variable in held]
        for variable in held:
            free_memory(variable)
        return [flat(tensor) for tensor in found]

    for factor in (2.0, 5.0):
        for shape, value in zip(SHAPES, read_and_free(tf.constant(factor)), strict=True):
            np.testing.assert_array_equal(value, np.full(int(np.prod(shape)), factor, "float32"))
