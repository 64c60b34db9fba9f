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
        ((reader,),) = gather_again(graph, [burst], [], prefetch=0).values()
        assert reader.inputs[0].name != whole.name
        return gradient

    np.testing.assert_array_equal(gradient_of(tf.constant([-2.0, 3.0])), [-1.0, 1.0])


def test_what_reads_a_parameter_in_the_backward_pass_is_told_by_variable():
    """The gradient of one layer need not wait for what the others read."""

    @tf.function(autograph=False)
    def gradients_of(inputs, first, last):
        graph = tf.compat.v1.get_default_graph()
        with tf.GradientTape() as tape:
            wholes = [1.0 * first, 1.0 * last]
            tape.watch(wholes)
            outputs = tf.matmul(tf.tanh(tf.matmul(inputs, wholes[0])), wholes[1])
        bursts = [
            Burst({number: Gather(whole, lambda kernel=kernel: 1.0 * kernel)}, end=len(graph.get_operations()))
            for number, (whole, kernel) in enumerate(zip(wholes, (first, last), strict=True))
        ]
        gradients = tape.gradient(outputs, wholes)
        readers = gather_again(graph, bursts, [], prefetch=0)
        assert list(readers) == [1], "that of the first one is for the inputs, which nobody asks for"
        assert [operation.type for operation in readers[1]] == ["MatMul"]
        return gradients

    kernels = tf.ones([2, 3]), tf.ones([3, 1])
    assert [g.shape for g in gradients_of(tf.ones([4, 2]), *kernels)] == [(2, 3), (3, 1)]
