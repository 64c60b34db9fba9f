"""What scripts call on a wrapped optimizer besides Keras' own methods, on whichever Keras tf.keras is here."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from world import World

import hvdtrain.horovod as hvd
from hvdtrain.config.errors import ConfigError


def aggregates_computed_gradients(world: World, adding: Any) -> None:
    """`_compute_gradients` and `apply_gradients`, told as Keras 2.3 did not to aggregate, are Horovod's arithmetic.

    Args:
        world: this launch.
        adding: an optimizer that adds gradients to its variables.
    """
    passes, rate = 2, world.rank + 1.0
    optimizer = hvd.DistributedOptimizer(adding, backward_passes_per_step=passes, sparse_as_dense=True)
    shared, own = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    optimizer.register_local_var(own)

    def loss() -> tf.Tensor:
        return rate * (tf.gather(shared, [0]) + tf.gather(own, [0]))

    @tf.function
    def step() -> None:
        pairs = optimizer._compute_gradients(loss, var_list=[shared, own])
        optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)

    mean = (world.size + 1) / 2
    for call in range(1, 6):
        step()
        updates = call // passes * passes
        np.testing.assert_allclose(shared.numpy(), [1.0 + updates * mean, 2.0])
        np.testing.assert_allclose(own.numpy(), [1.0 + updates * rate / world.size, 2.0])
        assert int(optimizer.iterations) == call // passes
        assert int(optimizer._agg_helper.counter) == call % passes


def reduces_a_computed_gradient_once(world: World, adding: Any) -> None:
    """A sum would show a second reduction."""
    optimizer = hvd.DistributedOptimizer(adding, op=hvd.Sum)
    variable = tf.Variable([0.0])
    rate, total = world.rank + 1.0, world.size * (world.size + 1) / 2
    for compute in (optimizer.compute_gradients, optimizer._compute_gradients):
        variable.assign([0.0])
        ((gradient, _),) = compute(lambda: rate * variable, [variable])
        optimizer.apply_gradients(zip([gradient], [variable], strict=True))
        np.testing.assert_allclose(variable.numpy(), [total])

    def step() -> None:
        ((gradient, _),) = optimizer.compute_gradients(lambda: rate * variable, [variable])
        optimizer.apply_gradients([(tf.clip_by_norm(gradient, 1e3), variable)])

    for clipped in (step, tf.function(step)):
        variable.assign([0.0])
        for calls in (1, 2):
            clipped()
            np.testing.assert_allclose(variable.numpy(), [calls * total])
    with pytest.raises(ConfigError, match="With op=Sum, gradients are reduced once"):
        optimizer.apply_gradients([(tf.constant([rate]), variable)])
    (reduced,) = optimizer._allreduce([tf.constant([rate])], [variable])
    np.testing.assert_allclose(reduced.numpy(), [total])
    assert optimizer._agg_helper is None


def reduces_gradients_of_its_own(world: World, adding: Any) -> None:
    """An optimizer whose class has a `get_gradients` of its own."""

    class WithGradients(type(adding)):  # type: ignore[misc]
        def get_gradients(self, loss: Any, params: Any) -> list[tf.Tensor]:
            return [tf.constant([world.rank + 1.0])]

    optimizer = hvd.DistributedOptimizer(WithGradients.from_config(adding.get_config()))
    variable = tf.Variable([0.0])
    (gradient,) = optimizer.get_gradients(None, [variable])
    optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_allclose(variable.numpy(), [(world.size + 1) / 2])
