"""Names of collectives in functions that TensorFlow traces more than once."""

from functools import partial

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.runtime.compiled import numbered


def names_of(layer, calls=1):
    """Return the names that each trace of a nested function has used, for layers whose variables exist or do not."""
    traces = []

    @tf.function
    def inner(x):
        traces.append([numbered("gradients"), numbered("gradients")])
        return layer(x)

    @tf.function
    def outer(x):
        for _ in range(calls):
            x = inner(x)
        traces.append([numbered("gradients")])
        return x

    outer(tf.ones((2, 3)))
    return traces


def test_a_second_trace_takes_the_names_of_the_first():
    """A rank that creates variables and one that has them already exchange under the same names."""
    built = keras.layers.Dense(3)
    built(np.ones((2, 3)))
    exists, creates = names_of(built), names_of(keras.layers.Dense(3))
    assert exists == [["gradients", "gradients#2"], ["gradients#3"]]
    assert creates == [exists[0], *exists]


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


def test_functions_that_both_run_have_names_of_their_own():
    traces = []

    def make(layer):
        @tf.function
        def inner(x):
            traces.append(numbered("gradients"))
            return layer(x)

        return inner

    functions = [make(keras.layers.Dense(3)) for _ in range(2)]
    tf.function(lambda x: [function(x) for function in functions])(tf.ones((2, 3)))
    assert traces == ["gradients", "gradients", "gradients#2", "gradients#2"]
