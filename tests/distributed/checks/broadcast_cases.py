"""Models that are built in their first step, and their broadcast, on whichever Keras tf.keras is in this process."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from world import World

import hvdtrain.horovod as hvd
import hvdtrain.horovod.keras as hvd_keras
from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.flavour import keras


class Subclassed(keras.Model):
    """A model whose layers no input shape is known for."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(4)
        self.dropout = keras.layers.Dropout(0.1)
        self.out = keras.layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.out(self.dropout(self.hidden(inputs), training=training))


class WithSpare(Subclassed):
    """A model with a layer that its first steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = keras.layers.Dense(4)


class Adversarial(Subclassed):
    """A model with two optimizers, of which only its own step knows."""

    def compile(self, first: Any, second: Any) -> None:
        super().compile()
        self.first, self.second = first, second

    def train_step(self, data: Any) -> dict[str, Any]:
        for layer, optimizer in ((self.hidden, self.first), (self.out, self.second)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(data[0]) - data[1]))
            variables = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def sequential() -> Any:
    return keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)])


def samples(world: World) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(world.rank)
    return rng.random((24, 6), "float32"), rng.random((24, 1), "float32")


def assert_same(world: World, variables: Iterable[Any]) -> None:
    values = [np.asarray(variable) for variable in variables]
    assert sum(value.size for value in values) > 30
    assert world.same_everywhere(b"".join(value.tobytes() for value in values))


def trains_unbuilt_models(world: World, kinds: Iterable[tuple[Callable[[], Any], Callable[[], Any]]]) -> None:
    """After fit, and after steps with Horovod's own call of the callback, weights and slots are rank 0's."""
    keras.utils.set_random_seed(world.rank)
    x, y = samples(world)
    for build, kind in kinds:
        model = build()
        model.compile(hvd_keras.DistributedOptimizer(kind()), "mse")
        callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
        if build is sequential:
            model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])
        else:
            callback.set_model(model)
            for batch in range(2):
                model.train_on_batch(x, y)
                callback.on_batch_end(batch)
        assert_same(world, [*model.trainable_variables, *model.optimizer.variables()])


def resumes_on_the_first_rank(world: World, kind: Callable[[], Any]) -> None:
    """What rank 0 alone has trained before goes to ranks whose model and optimizer are not even built."""
    keras.utils.set_random_seed(world.rank)
    x, y = samples(world)
    model = Subclassed()
    if world.rank == 0:
        model.compile(kind(), "mse")
        model.fit(x, y, batch_size=8, verbose=0)
        model.compile(hvd_keras.DistributedOptimizer(model.optimizer), "mse")
    else:
        model.compile(hvd_keras.DistributedOptimizer(kind()), "mse")
    model.fit(x[:8], y[:8], verbose=0, callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert int(model.optimizer.iterations) == 4
    assert_same(world, [*model.trainable_variables, *model.optimizer.variables()])


def broadcasts_every_optimizer(world: World) -> None:
    keras.utils.set_random_seed(world.rank)
    x, y = samples(world)
    model = Adversarial()
    first, second = (hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.1 / (world.rank + 1))) for _ in range(2))
    model.compile(first, second)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)])
    np.testing.assert_allclose([float(first.lr), float(second.lr)], 0.1)
    assert_same(world, [*model.trainable_variables, *first.variables(), *second.variables()])


def refuses_variables_that_differ(world: World) -> None:
    """A rank with fewer variables, or others, would leave the others waiting."""
    variables = [tf.Variable(tf.zeros(3 + place)) for place in range(3)]
    with pytest.raises(ConfigError, match="Received: 3 on rank 0, 0 on rank 1"):
        hvd.broadcast_variables(variables if world.rank == 0 else [], root_rank=0)
    with pytest.raises(ConfigError, match=rf"number 1, .* of shape \({4 + world.rank},\) .* on rank {world.rank}"):
        hvd.broadcast_variables([variables[0], variables[1 + world.rank]], root_rank=0, inplace=True)


def warns_of_broadcasts_without_weights(world: World) -> None:
    """A loop that broadcasts before its model is built, and layers that come after the callback."""
    model = WithSpare()
    with pytest.warns(UserWarning, match="broadcast_variables received no weights"):
        hvd.broadcast_variables(model.variables, root_rank=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.broadcast_variables(hvd_keras.DistributedOptimizer(keras.optimizers.SGD()).variables(), root_rank=0)
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    model(samples(world)[0])
    callback.on_batch_end(0)
    model.spare(samples(world)[0])
    with pytest.warns(UserWarning, match="kernel.* were created after BroadcastGlobalVariablesCallback"):
        callback.on_train_end()
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(Subclassed())
    with pytest.raises(ConfigError, match="found nothing to broadcast: subclassed"):
        callback.on_batch_end(0)
