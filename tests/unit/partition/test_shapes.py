"""What code of a user's own reads of shapes and asserts, in a step that sees the whole batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.partition.kinds import Rows
from hvdtrain.partition.partition import Fetch, Partition, unfolded
from hvdtrain.partition.step import open_rows
from hvdtrain.partition.tracing import traced

WHOLE = np.arange(15.0).reshape(5, 3)


class OtherRank:
    """Collectives of the first of two ranks, to which the other one's rows are known."""

    index, size = 0, 2

    def all_gather(self, tensor: tf.Tensor, **options: Any) -> tf.Tensor:
        return tf.concat([tensor, tf.cast(WHOLE[2:], tensor.dtype)], 0)

    def all_reduce(self, tensor: tf.Tensor, **options: Any) -> tf.Tensor:
        raise AssertionError("nothing is reduced here")


def stepped(function: Callable[[tf.Tensor], Any], total: Any = 5, autograph: bool = False) -> tuple[Any, list[Fetch]]:
    """Return what a step computes on the first rank, of two of five samples or whole, and what it fetches for it."""
    fetches: list[Fetch] = []

    def run(x: tf.Tensor) -> Any:
        opened = open_rows(x)
        rows, begin = tf.shape(opened)[0], tf.constant(0)
        partition = Partition(OtherRank(), rows=rows, begin=begin, total=total, first=unfolded(first=True))  # type: ignore[arg-type]
        partition.mark(opened, Rows())
        called = tf.autograph.to_graph(function) if autograph else function
        with traced(partition):
            found = called(opened)
            fetches[:] = partition.fetches
            return found if isinstance(partition.kind(found), Rows) else partition.whole(found)

    return tf.function(run, autograph=False)(tf.constant(WHOLE[:2])), fetches


@pytest.mark.parametrize(
    ("function", "right"),
    [
        (lambda x: tf.reduce_sum(x, 1) / x.shape[0], WHOLE.sum(1) / 5),
        (lambda x: tf.zeros((x.shape[0], 3), x.dtype) + x, WHOLE),
        (lambda x: tf.reshape(x, (x.shape[0], -1, 1)), WHOLE[..., None]),
        (lambda x: tf.ones(x.shape, x.dtype) * x, WHOLE),
        (lambda x: x * (2.0 if x.get_shape().as_list()[0] == 5 else 1.0), 2 * WHOLE),
        (lambda x: tf.add_n([x[each] for each in range(x.shape[0])]), WHOLE.sum(0)),
        (lambda x: tf.tile(tf.constant([[1.0, 2.0, 3.0]], x.dtype), [x.shape[0], 1]) * x, WHOLE * [1.0, 2.0, 3.0]),
    ],
)
def test_a_shape_that_a_step_reads_is_that_of_the_whole_batch(function, right):
    found = stepped(function)[0]
    np.testing.assert_allclose(found, right[: len(found)])


def test_a_loop_over_samples_has_those_of_the_whole_batch():
    def total(x):
        found = tf.zeros(3, x.dtype)
        for row in x:
            found += row
        return found / tf.cast(len(x), x.dtype)

    np.testing.assert_allclose(stepped(total, autograph=True)[0], WHOLE.mean(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / x.shape[0],
        lambda x: [x[each] for each in range(x.shape[0])],
        lambda x: tf.zeros((x.shape[0], 3)),
        lambda x: tf.reshape(x, (x.shape[0], 3)),
    ],
)
def test_an_unknown_number_of_samples_is_refused_with_what_to_write(function):
    with pytest.raises(ConfigError, match=r"test_shapes\.py:\d+ reads .*tf\.shape\(x\)\[0\]"):
        stepped(function, total=tf.constant(5))


def test_code_may_ask_whether_a_number_of_samples_is_known():
    found, _ = stepped(lambda x: x / tf.cast(x.shape[0] or tf.shape(x)[0], x.dtype), total=tf.constant(5))
    np.testing.assert_allclose(found, WHOLE[:2] / 5)


def test_an_assertion_of_samples_fetches_none_and_raises_what_it_says():
    def checked(limit):
        def step(x):
            tf.debugging.assert_less(x, tf.constant(limit, x.dtype), message="a sample is too large")
            tf.Assert(tf.reduce_all(x >= 0), [x])
            return 2.0 * x

        return step

    found, fetches = stepped(checked(99.0))
    np.testing.assert_allclose(found, 2 * WHOLE[:2])
    assert not fetches
    with pytest.raises(tf.errors.InvalidArgumentError, match="a sample is too large"):
        stepped(checked(4.0))
