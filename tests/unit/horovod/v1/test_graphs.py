"""Graphs that a session runs are told from functions that run by themselves."""

import tensorflow as tf

from hvdtrain.horovod.v1.variables import in_session_graph


def seen_in_a_function():
    seen = []
    tf.function(lambda: seen.append(in_session_graph()), autograph=False)()
    return seen


def seen_in_a_branch():
    seen = []

    def branch():
        seen.append(in_session_graph())
        return tf.constant(1)

    tf.function(lambda: tf.cond(tf.constant(True), branch, branch), autograph=False)()
    return seen


def test_eager_code_and_its_functions_are_no_session_graphs():
    assert not in_session_graph()
    assert seen_in_a_function() == [False]
    assert not any(seen_in_a_branch())


def test_a_graph_and_what_is_within_it_is_one():
    with tf.Graph().as_default():
        assert in_session_graph()
        assert seen_in_a_function() == [True]
        assert all(seen_in_a_branch())
