"""The second gather of parameters, for the backward pass."""

import numpy as np
import tensorflow as tf

from hvdtrain.training.update_rules.zero.regather import Burst, Gather, gather_again


def test_the_gradient_of_a_penalty_on_a_parameter_alone():
    """Of L1 it is the sign of the parameter: it has no other input to begin with."""

    @tf.function(autograph=False)
    def gradient_of(kernel):
        graph = tf.compat.v1.get_default_graph()
        with tf.GradientTape() as tape:
            whole = 1.0 * kernel
            tape.watch(whole)
            penalty = tf.reduce_sum(tf.abs(whole))
        burst = Burst({0: Gather(whole, lambda: 1.0 * kernel)}, end=len(graph.get_operations()))
        gradient = tape.gradient(penalty, whole)
        (reader,) = gather_again(graph, [burst], [], prefetch=0)
        assert reader.inputs[0].name != whole.name
        return gradient

    np.testing.assert_array_equal(gradient_of(tf.constant([-2.0, 3.0])), [-1.0, 1.0])
