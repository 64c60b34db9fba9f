"""Steps, losses, metrics and layers of a user's own have the values of one process with the whole batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from world import World, computing_in, refused
from worlds import worlds

import hvdtrain
from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import split_bounds
from hvdtrain.runtime.session import current
from hvdtrain.training.update_rules.zero import shards

ops, layers = keras.ops, keras.layers
SAMPLES, BATCH, EPOCHS = 42, 8, 3
"""The last batch has two samples: of four ranks two have none."""
rng = np.random.default_rng(0)
X = rng.standard_normal((SAMPLES, 6))
Y = X[:, :2] @ rng.standard_normal((2, 2)) + 0.1 * rng.standard_normal((SAMPLES, 2))
SEQUENCES = rng.standard_normal((SAMPLES, 5, 3))


class Base(keras.Model):
    """A network with a figure of its own; what follows are the steps of Keras' guides and examples, by their kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(2)])
        self.figure = keras.metrics.Mean(name="figure")
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.net(inputs)

    @property
    def metrics(self) -> list[Any]:
        return [self.figure]

    def noise(self, like: Any) -> Any:
        return keras.random.normal(ops.shape(like), seed=self.seeds, dtype=like.dtype)

    def applied(self, gradients: Any, loss: Any, **figures: Any) -> dict[str, Any]:
        self.optimizer.apply(gradients, self.trainable_variables)
        self.figure.update_state(loss)
        return {"loss": loss, "figure": self.figure.result(), **figures}

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.cost(*data)
        return self.applied(tape.gradient(loss, self.trainable_variables), loss)

    def cost(self, x: Any, y: Any) -> Any:
        raise NotImplementedError


class SumBesideDecay(Base):
    def cost(self, x: Any, y: Any) -> Any:
        decay = tf.add_n([ops.sum(each**2) for each in self.trainable_variables])
        return 0.1 * ops.sum((self(x) - y) ** 2) + 0.01 * decay


class Sampling(Base):
    """A mean and a sum, with noise drawn for the batch, as in a variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.variance, self.decoder = layers.Dense(3), layers.Dense(3), layers.Dense(6)

    def cost(self, x: Any, y: Any) -> Any:
        hidden = self.net(x)
        mean, variance = self.mean(hidden), self.variance(hidden)
        sampled = mean + ops.exp(0.5 * variance) * self.noise(mean)
        spread = ops.sum(1 + variance - mean**2 - ops.exp(variance))
        return ops.mean(ops.sum((self.decoder(sampled) - x) ** 2, -1)) - 0.005 * spread


class Contrast(Base):
    """Two views of each sample, of which those of other samples are the negatives (SimCLR)."""

    def cost(self, x: Any, y: Any) -> Any:
        views = [ops.normalize(self.net(x + 0.1 * self.noise(x)), axis=1) for _ in range(2)]
        scores = ops.matmul(views[0], ops.transpose(views[1])) / 0.5
        numbers = ops.arange(ops.shape(x)[0])
        return ops.mean(keras.losses.sparse_categorical_crossentropy(numbers, scores, from_logits=True))


class Missing(Base):
    """Targets of which some are missing: a sum over a sum, both of the batch."""

    def cost(self, x: Any, y: Any) -> Any:
        known = ops.cast(x[:, 2:4] < 0.3, x.dtype)
        return ops.sum(known * (self(x) - y) ** 2) / (1e-3 + ops.sum(known))


class Clipped(Base):
    """Clips its gradients by hand, and shows their norm."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.sqrt(ops.mean((self(x + 0.1 * self.noise(x)) - y) ** 2))
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.3)
        return self.applied(gradients, loss, norm=norm)


class States(Base):
    """A largest value that the step keeps, a queue of earlier outputs, and steps that the loss skips."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.add_weight(shape=(2,), initializer="zeros", trainable=False, name="largest")
        self.queue = self.add_weight(shape=(5, 2), initializer="zeros", trainable=False, name="queue")

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x)
            self.largest.assign(0.9 * self.largest + 0.1 * ops.max(outputs, axis=0))
            far = ops.mean((outputs[:, None] - ops.convert_to_tensor(self.queue)[None]) ** 2)
            loss = ops.mean((outputs - y) ** 2) + 0.1 * ops.mean((outputs - self.largest) ** 2) - 0.01 * far
        self.queue.assign(ops.concatenate([outputs, self.queue], 0)[:5])
        gradients = tape.gradient(loss, self.trainable_variables)
        taken = tf.cast(loss < 3.0, loss.dtype)
        return self.applied([taken * each for each in gradients], loss, count=ops.shape(x)[0], half=0.5)


class Statistics(Base):
    """Dropout, and statistics of the batch by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = layers.Dropout(0.4, seed=3)

    def cost(self, x: Any, y: Any) -> Any:
        outputs = self.drop(self.net(x), training=True)
        normal = (outputs - ops.mean(outputs, 0)) / ops.sqrt(ops.var(outputs, 0) + 1e-2)
        return ops.mean((normal - y) ** 2)


class Sharpness(Base):
    """Perturbed weights and a second gradient (SAM), and a penalty on the covariance of the batch."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x) - y) ** 2)
        gradients = tape.gradient(loss, weights)
        moves = [0.05 * each / tf.linalg.global_norm(gradients) for each in gradients]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            outputs = self(x)
            centered = outputs - ops.mean(outputs, 0)
            loss = ops.mean((outputs - y) ** 2) + 0.1 * ops.sum(ops.matmul(ops.transpose(centered), centered) ** 2) / 64
        gradients = tape.gradient(loss, weights)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        return self.applied(gradients, loss)


class Adversaries(Base):
    """Two optimizers; real and made samples in one batch, with a penalty on the gradients between them (WGAN-GP)."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = keras.Sequential([layers.Dense(5, activation="tanh"), layers.Dense(1)])
        self.critics = keras.optimizers.Adam(0.02)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.critic(self.net(inputs))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        count = ops.shape(x)[0]
        with tf.GradientTape() as tape:
            made = self.net(self.noise(x))
            both = ops.concatenate([made, y], 0)
            labels = ops.concatenate([ops.ones((count, 1), x.dtype), ops.zeros((count, 1), x.dtype)], 0)
            mixed = y + ops.cast(keras.random.uniform((count, 1), seed=self.seeds), y.dtype) * (made - y)
            with tf.GradientTape() as inner:
                inner.watch(mixed)
                scores = self.critic(mixed)
            slopes = ops.sqrt(ops.sum(inner.gradient(scores, mixed) ** 2, 1) + 1e-12)
            cost = ops.mean(keras.losses.binary_crossentropy(labels, self.critic(both), from_logits=True))
            cost += 0.3 * ops.mean((slopes - 1.0) ** 2)
        variables = self.critic.trainable_variables
        self.critics.apply(tape.gradient(cost, variables), variables)
        with tf.GradientTape() as tape:
            loss = -ops.mean(self.critic(self.net(self.noise(x)))) + 0.1 * ops.mean((self.net(x) - y) ** 2)
        variables = self.net.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.figure.update_state(loss)
        return {"cost": cost, "loss": loss, "figure": self.figure.result()}


STEPS: dict[str, Callable[[], keras.Model]] = {
    each.__name__: each
    for each in (SumBesideDecay, Sampling, Contrast, Missing, Clipped, States, Statistics, Sharpness, Adversaries)
}


def built(make: Callable[[], keras.Model]) -> keras.Model:
    keras.utils.set_random_seed(7)
    model = make()
    if isinstance(model, Sampling):
        hidden = model.net(X[:2])
        model.variance(hidden)
        model.decoder(model.mean(hidden))
        model.built = True
    else:
        model(X[:2])
    model.compile(keras.optimizers.Adam(0.01))
    return model


def own_loss(targets: Any, outputs: Any) -> Any:
    """Pull outputs apart within the batch; one number."""
    return ops.mean((targets - outputs) ** 2) + 0.1 * ops.exp(-ops.mean(ops.var(outputs, axis=0)))


class Spread(layers.Layer):
    """Adds what the outputs of a batch have in common, and shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.common = keras.metrics.Mean(name="common")

    def call(self, inputs: Any) -> Any:
        common = ops.sum(ops.mean(inputs, 0) ** 2)
        self.add_loss(0.3 * common)
        self.add_loss(0.01 * ops.sum(inputs**2))
        self.common.update_state(common)
        return inputs


class Widest(keras.metrics.Metric):
    """The largest error so far, which is no sum."""

    def __init__(self) -> None:
        super().__init__(name="widest")
        self.value = self.add_weight(shape=(), initializer="zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.maximum(self.value, ops.max(ops.abs(y_true - y_pred))))

    def result(self) -> Any:
        return ops.convert_to_tensor(self.value)


class OwnLoss(keras.Model):
    """A loss of the model's own: the samples of a batch against one another."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        apart = ops.logsumexp(-ops.sum((y_pred[:, None] - y_pred[None]) ** 2, -1))
        return ops.mean((y - y_pred) ** 2) + 0.05 * apart + sum(self.losses)


def losses_and_layers() -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    hidden = layers.Dropout(0.2, seed=1)(layers.Dense(8, activation="tanh")(inputs))
    model = keras.Model(inputs, Spread()(layers.Dense(2)(hidden)))
    model.compile(keras.optimizers.SGD(0.05), own_loss, metrics=[Widest(), "mae"])
    return model


def recurrent(kind: type[keras.Model] = OwnLoss) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5, 3))
    hidden = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(layers.Masking()(inputs))
    hidden = layers.MultiHeadAttention(2, 3, dropout=0.1, use_bias=False, seed=2)(hidden, hidden)
    model = kind(inputs, layers.Dense(2)(layers.GRU(4)(layers.LayerNormalization()(hidden))))
    model.compile(keras.optimizers.SGD(0.05))
    return model


def trained(
    make: Callable[[], keras.Model], x: Any, y: Any = Y, backend: Any = None, dtype: str = "float64", **options: Any
) -> tuple[list[Any], Any]:
    """Return weights and History of a training, by default in this process."""
    with computing_in(dtype):
        model = make()
        trainer = hvdtrain.Trainer(model, backend=backend, **options)
        held = None if isinstance(model, Base) else (x[:9], y[:9])
        result = trainer.fit(x, y, batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, validation_data=held)
        return model.get_weights(), result.history


def alone(make: Callable[[], keras.Model], x: Any, y: Any = Y, zero: int = 0, **options: Any) -> tuple[list[Any], Any]:
    return trained(make, x, y, SingleBackend(current()), **options)


def assert_equal(found: tuple[list[Any], Any], right: tuple[list[Any], Any]) -> None:
    for mine, other in zip(found[0], right[0], strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-9)
    assert sorted(found[1]) == sorted(right[1])
    for name, values in right[1].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-8, atol=1e-9, err_msg=name)


def assert_as_one_process(world: World, make: Callable[[], keras.Model], x: Any, **options: Any) -> None:
    assert_equal(trained(make, x, backend=world.backend, **options), alone(make, x, **options))


@contextmanager
def noted(name: str) -> Iterator[None]:
    """Say in an error inside the context what was tried."""
    try:
        yield
    except Exception as error:
        error.add_note(name)
        raise


@worlds("mpirun-2", why="nine models, each trained twice")
@worlds("gloo-4", extended=True)
def check_own_steps_train_as_one_process_does(world: World) -> None:
    for name, make in STEPS.items():
        with noted(name):
            assert_as_one_process(world, lambda make=make: built(make), X)


@worlds("mpirun-2", extended=True, why="each step once more")
def check_own_steps_in_32_bits_differ_by_their_rounding(world: World) -> None:
    """After some twenty steps."""
    for name, make in STEPS.items():
        with noted(name):
            (mine, _), (right, _) = (
                trained(lambda make=make: built(make), X, backend=backend, dtype="float32")
                for backend in (world.backend, SingleBackend(current()))
            )
            for one, other in zip(mine, right, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@worlds("mpirun-2", "gloo-4", extended=True, why="other places of own code")
def check_own_losses_layers_and_metrics_train_as_one_process_does(world: World) -> None:
    assert_as_one_process(world, losses_and_layers, X)
    assert_as_one_process(world, recurrent, SEQUENCES)


@worlds("mpirun-2", extended=True, why="what an optimizer, a guard and an update rule add to a step")
def check_own_steps_go_with_options(world: World) -> None:
    for options in ({"clip_norm": 0.2}, {"on_bad_step": "skip"}, {"zero": 1}, {"desync_every": 2}):
        assert_as_one_process(world, lambda: built(Sampling), X, **options)


@worlds("gloo-4", extended=True, why="each step once more, with two stages")
def check_own_steps_go_with_slices_of_gradients_and_weights(world: World) -> None:
    with mock.patch.object(shards, "SMALL_BYTES", 64):
        for name, make in STEPS.items():
            for options in ({"zero": 2}, {"zero": 3}):
                if make is Adversaries:
                    with refused("which applies gradients several times", ConfigError):
                        trained(lambda make=make: built(make), X, backend=world.backend, **options)
                elif make in (Clipped, Sharpness) and options["zero"] == 3:
                    with refused("where L2Loss needs the whole", ConfigError):
                        trained(lambda make=make: built(make), X, backend=world.backend, **options)
                else:
                    with noted(f"{name} {options}"):
                        assert_as_one_process(world, lambda make=make: built(make), X, **options)


def microbatches_of_ranks(x: Any, size: int, accumulate: int) -> Any:
    """Return samples in an order in which microbatches of one process are those of all ranks."""
    order: list[int] = []
    length = BATCH // size // accumulate
    for begin in range(0, len(x), BATCH):
        count = min(BATCH, len(x) - begin)
        slices = [range(*split_bounds(count, rank, size)) for rank in range(size)]
        order += [
            begin + sample
            for first in range(0, length * accumulate, length)
            for mine in slices
            for sample in mine[first : first + length]
        ]
    return x[order]


def assert_accumulated_as_in_one_process(world: World, make: Callable[[], keras.Model], **options: Any) -> None:
    x, y = (np.concatenate([each, each[:4]]) for each in (X, Y))  # microbatches of the last batch are uneven
    found = trained(make, x, y, world.backend, accumulate=2, **options)
    x, y = (microbatches_of_ranks(each, world.size, 2) for each in (x, y))
    assert_equal(found, alone(make, x, y, accumulate=2, **options))


def check_microbatches_of_own_steps_are_batches(world: World) -> None:
    for make in (Missing, Statistics):
        with noted(make.__name__):
            assert_accumulated_as_in_one_process(world, lambda make=make: built(make))


@worlds("gloo-4", extended=True, why="each step, and with slices of gradients and weights")
def check_microbatches_of_all_own_steps_are_batches(world: World) -> None:
    for name, make in STEPS.items():
        if make is not Adversaries:
            with noted(name):
                assert_accumulated_as_in_one_process(world, lambda make=make: built(make))
    with mock.patch.object(shards, "SMALL_BYTES", 64):
        for options in ({"zero": 2}, {"zero": 3}, {"zero": 3, "on_bad_step": "skip"}):
            with noted(str(options)):
                assert_accumulated_as_in_one_process(world, lambda: built(Sampling), **options)


@hvdtrain.whole_batch
def sum_of_squares(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.reduce_sum(x**2), tf.random.stateless_normal(tf.shape(x), [1, 2], dtype=tf.float64) * x


def check_a_step_of_an_own_loop_sees_the_whole_batch(world: World) -> None:
    mine = X[world.rank :: world.size][: 3 + world.rank]
    everything = np.concatenate([X[rank :: world.size][: 3 + rank] for rank in range(world.size)])
    total, noisy = sum_of_squares(mine)
    drawn = tf.random.stateless_normal(everything.shape, [1, 2], dtype=tf.float64)
    np.testing.assert_allclose(total, np.sum(everything**2))
    np.testing.assert_allclose(noisy, drawn * everything)

    with computing_in("float64"):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4, activation="tanh"), layers.Dense(1)])
        optimizer, error = keras.optimizers.Adam(0.05), keras.metrics.MeanAbsoluteError()
        optimizer.build(model.trainable_variables)
        right = keras.models.clone_model(model)
        right.set_weights(model.get_weights())
        steps = keras.optimizers.Adam(0.05)

        def train(model: Any, optimizer: Any, error: Any) -> Callable[[Any], Any]:
            def step(x: Any) -> Any:
                with tf.GradientTape() as tape:
                    outputs = model(x)
                    loss = tf.math.reduce_std(outputs) + tf.reduce_sum(outputs**2)
                    if loss > 1.0:  # autograph's
                        loss = 0.5 * loss
                variables = model.trainable_variables
                optimizer.apply(tape.gradient(loss, variables), variables)
                error.update_state(tf.zeros_like(outputs), outputs)
                return {"loss": loss}

            return step

        ours = hvdtrain.whole_batch(train(model, optimizer, error))
        of_right = keras.metrics.MeanAbsoluteError()
        theirs = train(right, steps, of_right)
        for _ in range(5):
            np.testing.assert_allclose(ours(mine)["loss"], theirs(tf.constant(everything))["loss"], rtol=1e-9)
        for one, other in zip(model.get_weights(), right.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(error.result(), of_right.result(), rtol=1e-9)

    @hvdtrain.whole_batch
    def exchanging(x: Any) -> Any:
        return hvdtrain.allreduce(tf.reduce_sum(x))

    with refused("exchanges at", ConfigError):
        exchanging(mine)

    @hvdtrain.whole_batch
    def in_python(x: Any) -> Any:
        return tf.numpy_function(np.sum, [x], tf.float64)

    with refused("Python function", ConfigError):
        in_python(mine)
    with refused("[samples, …] alone", ConfigError):
        sum_of_squares(tf.constant(1.0))


class InPython(layers.Layer):
    """Doubles samples in a Python function."""

    def call(self, x: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(lambda value: 2 * value, [x], x.dtype), x.shape)


def check_python_functions_are_called_with_a_ranks_own_samples_or_refused(world: World) -> None:
    """Evaluation goes with training: where an option keeps its steps apart, an epoch is not lost at its end."""
    if world.size == 1:
        return
    model = keras.Sequential([keras.Input((6,)), InPython(), layers.Dense(2)])
    model.compile("sgd", "mse")
    right = model.evaluate(X, Y, verbose=0)
    with refused("A Python function", ConfigError):
        hvdtrain.Trainer(model, backend=world.backend).evaluate(X, Y)
    trainer = hvdtrain.Trainer(model, backend=world.backend, reduce_op="adasum")
    np.testing.assert_allclose(trainer.evaluate(X, Y, verbose=0), right, rtol=1e-6)

    class Sums(keras.Model):
        def test_step(self, data: Any) -> dict[str, Any]:
            return {"sum": tf.reduce_sum(self(data[0])) + tf.reduce_sum(data[1])}

    own = Sums(model.inputs, model.outputs)
    own.compile("sgd", "mse")
    with refused("A Python function", ConfigError):
        hvdtrain.Trainer(own, backend=world.backend, reduce_op="adasum").evaluate(X, Y)


def check_layers_take_any_rows_of_samples(world: World) -> None:
    with computing_in("float64"):
        keras.utils.set_random_seed(2)
        recurrent, plain, normalized = layers.LSTM(2), layers.BatchNormalization(), hvdtrain.SyncBatchNormalization()
        everything = SEQUENCES[:5, :4]
        mine = everything[5 * world.rank // world.size : 5 * (world.rank + 1) // world.size]
        for layer, shape in ((recurrent, (None, 4, 3)), (plain, (None, 3)), (normalized, (None, 3))):
            layer.build(shape)

        def step(normalization: Any, x: Any) -> Any:
            with tf.GradientTape() as tape:
                of_each_two = recurrent(tf.reshape(x, [-1, 2, 3]))
                of_positions = recurrent(tf.transpose(x, [1, 0, 2]))
                of_both = normalization(tf.concat([x[:, 0], x[:, 1]], 0), training=True)
                whole = normalization(tf.cumsum(x[:, 2], 0), training=True)
                found = [tf.reduce_sum(each**3) for each in (of_each_two, of_positions, of_both, whole)]
                total = tf.add_n(found)
            variables = [*recurrent.trainable_variables, *normalization.trainable_variables]
            return found, tape.gradient(total, [each.value for each in variables])

        right = step(plain, tf.constant(everything))
        found = hvdtrain.whole_batch(lambda x: step(normalized, x))(mine)
        for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(right), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
        for one, other in zip(normalized.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9)
