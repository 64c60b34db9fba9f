"""Several batches in one compiled call: the same as one after another."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.data.batch import Batch
from hvdtrain.training.step.looped import Loop, of_one_kind


def batch_of(rows, targets=True, **fields):
    """Return a batch whose inputs are a dict of numbers that no other has."""
    first = batch_of.count = getattr(batch_of, "count", 0) + 1
    x = tf.reshape(tf.range(first, first + 2 * rows, dtype=tf.float32), [rows, 2])
    fields = {"has_samples": 1.0, "global_samples": rows, **fields}
    return Batch({"x": x, "optional": None}, tf.ones([rows]) if targets else None, None, **fields)


def lengths(batches):
    return [len(alike) for alike in of_one_kind(batches)]


def test_batches_of_one_kind_that_follow_one_another_go_together():
    four, three, without = batch_of(4), batch_of(3), batch_of(4, targets=False)
    assert lengths([four, four, three, three, three, four, without]) == [2, 3, 1, 1]
    assert lengths([four, four._replace(has_samples=0.0), four._replace(global_samples=8)]) == [1, 1, 1]
    counted = four._replace(global_samples=tf.constant(4))
    assert lengths([counted, counted._replace(global_samples=tf.constant(3)), four]) == [2, 1]
    assert [each for alike in of_one_kind([four, three, four]) for each in alike] == [four, three, four]


@pytest.mark.parametrize(
    "inputs", [tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.eye(2), tf.zeros([0, 3]), np.ones(2)]
)
def test_what_does_not_stack_goes_by_itself(inputs):
    assert lengths([Batch(inputs, None, None, 1.0, 2)] * 2) == [1, 1]


def test_a_loop_computes_what_one_call_after_another_does():
    """Each reads what the one before has written; the results may be of any structure."""
    state = tf.Variable(0.0)

    @tf.function(autograph=False)
    def step(batch):
        state.assign(2.0 * state + tf.reduce_sum(batch.inputs["x"]) * tf.cast(batch.global_samples, tf.float32))
        return {"state": state.read_value(), "rows": (batch.inputs["x"] + state, None)}

    batches = [batch_of(2, global_samples=tf.constant(number)) for number in range(3)]
    alone = [step(batch) for batch in batches]
    state.assign(0.0)
    loop = Loop(step, batches[0])
    together = loop(batches)
    assert together["state"].numpy().tolist() == [float(each["state"]) for each in alone]
    np.testing.assert_array_equal(together["rows"][0], [each["rows"][0] for each in alone])
    assert together["rows"][1] is None
    traced = loop.graph
    assert len(loop(batches[:2])["state"]) == 2, "of any number of batches"
    assert loop.graph is traced
