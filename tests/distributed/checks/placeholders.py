"""A replica that gets no samples of a short batch holds one that counts for nothing, whatever comes of it."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from builders import CROSS_ENTROPY, per_sample
from world import World, flat_bytes, moved, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.data.batch import slice_bounds


class Spread(keras.layers.Layer):
    """Multiplies by the logarithm of the variance over the batch: infinite for one sample, unless that is flagged."""

    def call(self, inputs: Any) -> Any:
        features, flags = inputs
        return features * tf.math.log(tf.math.reduce_variance(features, 0, keepdims=True) + tf.reduce_mean(flags))


def spreading() -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(3)(Spread()([keras.layers.Dense(4)(inputs), inputs[:, :1]]))
    return keras.Model(inputs, outputs)


@worlds("mpirun-2", extended=True)
def check_a_placeholder_that_overflows_counts_for_nothing(world: World) -> None:
    """In microbatches of four the last rank has five samples, and the second microbatch of the others none."""
    count = 4 * world.size + 1
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((count, 5)).astype("float32"), rng.integers(0, 3, count)
    x[:, 0] = 0.0
    x[-1, 0] = 1.0
    for whole_batch, length in ((True, 4 * world.size), (False, 4)):
        model, reference = spreading(), spreading()
        start = reference.get_weights()
        options = {"backend": world.backend, "accumulate": 2, "whole_batch": whole_batch}
        trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(0.5), CROSS_ENTROPY, **options)
        trainer.fit((x, y), batch=8 * world.size, shuffle=False, verbose=False)
        assert world.same_everywhere(flat_bytes(model.get_weights()))
        with tf.GradientTape() as tape:
            parts = [slice(first, min(first + length, count - 1)) for first in range(0, count - 1, length)]
            parts.append(slice(count - 1, count))
            total = tf.add_n([tf.reduce_sum(per_sample(y[part], reference(x[part]))) for part in parts]) / count
        gradients = tape.gradient(total, [v.value for v in reference.trainable_variables])
        expected = [np.array(w) - 0.5 * np.array(g) for w, g in zip(start, gradients, strict=True)]
        assert moved(expected, start) >= 1e-2
        error = relative_error(model.get_weights(), expected)
        assert error <= 1e-6, f"{whole_batch}: {error:.2e}"


class Calls(keras.layers.Layer):
    """Counts its calls in training, in 64 bits, which nobody averages."""

    def build(self, input_shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int64")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1)
        return inputs


@worlds("mpirun-2")
@worlds("gloo-1", "gloo-4", extended=True)
def check_statistics_are_those_of_samples(world: World) -> None:
    """The last batch has one sample: moving averages of the ranks without one stay where they are.

    A layer's count of calls goes on with the pass that they make all the same, so that ranks stay equal.
    """
    x = np.random.default_rng(1).standard_normal((4 * world.size + 1, 5)).astype("float32")
    y = np.zeros(len(x), "int64")
    for own_step in (False, True):
        norm, counter = keras.layers.BatchNormalization(momentum=0.5), Calls()
        keras.utils.set_random_seed(0)
        kind = WithOwnStep if own_step else keras.Sequential
        model = kind([keras.Input((5,)), counter, norm, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(0.0), loss, backend=world.backend)
        trainer.fit((x, y), batch=4 * world.size, shuffle=False, verbose=False)
        means = []
        for rank in range(world.size):
            mean = 0.5 * x[4 * rank : 4 * rank + 4].mean(0)
            if slice_bounds(1, rank, world.size)[2]:
                mean = 0.5 * mean + 0.5 * x[-1]
            means.append(mean)
        np.testing.assert_allclose(norm.moving_mean, np.mean(means, axis=0), rtol=1e-5, atol=1e-6)
        assert world.gather(str(int(counter.calls)).encode()) == [b"2"] * world.size
        assert world.same_everywhere(flat_bytes(model.get_weights()))


class WithOwnStep(keras.Sequential):
    """A model with a step of its own, which is Keras'."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@worlds("mpirun-2", extended=True)
def check_synchronized_statistics_move_on_every_rank(world: World) -> None:
    """A rank without samples takes part in them, and hands on no gradient of its placeholder."""
    x = np.random.default_rng(2).standard_normal((4 * world.size + 1, 5)).astype("float32")
    y = np.zeros(len(x), "int64")
    norm = hvdtrain.SyncBatchNormalization(momentum=0.5)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), norm, keras.layers.Dense(3)])
    trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(0.0), CROSS_ENTROPY, backend=world.backend)
    trainer.fit((x, y), batch=4 * world.size, shuffle=False, verbose=False)
    expected = 0.25 * x[:-1].mean(0) + 0.5 * x[-1]
    np.testing.assert_allclose(norm.moving_mean, expected, rtol=1e-5, atol=1e-6)
