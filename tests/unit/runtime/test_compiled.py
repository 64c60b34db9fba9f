"""Names of collectives in functions that TensorFlow traces more than once, or calls within one another."""

from functools import partial

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.runtime.compiled import names_under, numbered


def test_every_trace_of_a_function_uses_the_same_names():
    """A rank that creates variables, or meets another shape, and one that does not exchange under the same names."""
    traces = []

    def functions_of(layer):
        @tf.function
        def inner(x):
            traces.append([numbered("gradients"), numbered("gradients")])
            return layer(x)

        @tf.function
        def outer(*inputs):
            for x in inputs:
                inner(x)
            traces.append([numbered("gradients")])

        return inner, outer

    built, own, around = keras.layers.Dense(3), ["gradients", "gradients#2"], ["gradients"]
    built(np.ones((2, 3)))
    inner, outer = functions_of(built)
    outer(tf.ones((2, 3)))
    inner(tf.ones((5, 3)))
    assert traces == [own, around, own]
    traces.clear()
    functions_of(keras.layers.Dense(3))[1](tf.ones((2, 3)), tf.ones((4, 3)))
    assert [each for each in traces if each not in (own, around)] == []
    assert len(traces) > 3, "nothing was traced twice"


def test_branches_and_loops_are_numbered_with_the_function_around():
    traces = []

    def note(value):
        traces.append(numbered("gradients"))
        return value

    @tf.function(autograph=False)
    def function(x):
        tf.while_loop(lambda x: x < 3.0, note, [x])
        return note(tf.cond(x > 0.0, lambda: note(x), lambda: note(x)))

    function.get_concrete_function(tf.constant(1.0))
    assert traces == ["gradients", "gradients#2", "gradients#3", "gradients#4"]


def test_creators_of_variables_that_have_no_name():
    """As those of `functools.partial`."""
    traces = []

    @tf.function
    def inner(x):
        with tf.variable_creator_scope(partial(lambda make, **options: make(**options))):
            traces.append(numbered("gradients"))
        return x

    tf.function(inner)(tf.ones(2))
    assert traces == ["gradients"]


def test_a_prefix_names_what_a_function_uses_and_what_functions_in_it_do():
    traces = []

    @tf.function(autograph=False)
    def inner(x):
        traces.append(numbered("gradients"))
        return x

    @tf.function(autograph=False)
    def outer(x):
        with names_under("stage"):
            traces.append(numbered("gradients"))
            x = inner(x)
        traces.append(numbered("gradients"))
        return x

    outer(tf.ones(2))
    assert traces == ["stage/gradients", "stage/gradients#2", "gradients#3"]
