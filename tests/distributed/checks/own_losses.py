"""Losses that a model's own code forms, as means over the samples, sums, or over pairs of samples."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from as_keras import assert_same, assert_trained_as_keras
from world import World, computing_in
from worlds import worlds

import hvdtrain

RNG = np.random.default_rng(0)
SAMPLES, BATCH = 21, 8  # the last batch has 5: 3 and 2 on two ranks
X, Y = RNG.standard_normal((SAMPLES, 4)), RNG.standard_normal((SAMPLES, 1))
Loss = Callable[[Any, Any], Any]


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def sgd() -> Any:
    return keras.optimizers.SGD(0.1)


def squares(targets: Any, outputs: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.square(targets - outputs), -1)


def mean(targets: Any, outputs: Any) -> tf.Tensor:
    return tf.reduce_mean(squares(targets, outputs))


def total(targets: Any, outputs: Any) -> tf.Tensor:
    return 0.1 * tf.reduce_sum(squares(targets, outputs))


def of_strategies(targets: Any, outputs: Any) -> tf.Tensor:
    """As the guides of tf.distribute have it."""
    return tf.nn.compute_average_loss(squares(targets, outputs), global_batch_size=BATCH)


def over_pairs(targets: Any, outputs: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.square(targets - tf.transpose(outputs)) ** 2) + tf.reduce_mean(
        tf.reduce_logsumexp(outputs @ tf.transpose(outputs), 1)
    )


class OwnStep(keras.Model):
    """Metrics take a number of the whole batch, of every sample, and with the batch's samples as its weight."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.formed = loss
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.of_batches = keras.metrics.Mean(name="of_batches")
        self.of_samples = keras.metrics.Mean(name="of_samples")
        self.weighted = keras.metrics.Mean(name="weighted")
        self.summed = keras.metrics.Sum(name="summed")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    @property
    def metrics(self) -> list[Any]:
        return [self.of_batches, self.of_samples, self.weighted, self.summed]

    def counted(self, targets: Any, loss: Any) -> dict[str, Any]:
        self.of_batches.update_state(loss)
        self.of_samples.update_state(tf.abs(targets))
        self.weighted.update_state(loss, sample_weight=tf.cast(tf.shape(targets)[0], loss.dtype))
        self.summed.update_state(loss)
        return {**{metric.name: metric.result() for metric in self.metrics}, "of_the_last_batch": tf.reduce_sum(loss)}

    def train_step(self, data: Any) -> dict[str, Any]:
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = self.formed(targets, self(inputs, training=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return self.counted(targets, loss)

    def test_step(self, data: Any) -> dict[str, Any]:
        inputs, targets = data
        return self.counted(targets, self.formed(targets, self(inputs)))


class OwnLoss(keras.Model):
    def __init__(self, loss: Loss, *, beside_compiled: bool = False) -> None:
        super().__init__()
        self.formed = loss
        self.beside_compiled = beside_compiled
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        own = self.formed(y, y_pred)
        return own + super().compute_loss(x, y, y_pred, sample_weight) if self.beside_compiled else own


class Observed(keras.layers.Layer):
    """Keeps a mean of a number of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.size = keras.metrics.Mean(name="size")

    def call(self, inputs: Any) -> Any:
        self.size.update_state(tf.reduce_mean(tf.abs(inputs)))
        return inputs


class Adversarial(keras.Model):
    """A discriminator with a sum as its loss, a generator with a mean."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)
        self.generator, self.discriminator = keras.layers.Dense(4), keras.layers.Dense(1)
        self.cost = keras.metrics.Mean(name="cost")

    def compile(self, first: Any, second: Any) -> None:
        super().compile()
        self.first, self.second = first, second

    def call(self, inputs: Any) -> Any:
        return self.discriminator(self.generator(inputs))

    @property
    def metrics(self) -> list[Any]:
        return [self.cost]

    def train_step(self, inputs: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            false, true = self(inputs), self.discriminator(inputs)
            loss = 0.1 * tf.reduce_sum(tf.nn.softplus(false) + tf.nn.softplus(-true))
        variables = self.discriminator.trainable_variables
        self.first.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            cost = tf.reduce_mean(tf.nn.softplus(-self(inputs)))
        variables = self.generator.trainable_variables
        self.second.apply_gradients(zip(tape.gradient(cost, variables), variables, strict=True))
        self.cost.update_state(cost)
        return {"cost": self.cost.result(), "loss": loss}


class Towers(keras.Model):
    """Two towers: the partners of the other samples of a batch are a sample's negatives."""

    def __init__(self, *, gathers: bool) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)
        self.queries, self.keys = keras.layers.Dense(3), keras.layers.Dense(3)
        self.gathers = gathers

    def call(self, inputs: Any) -> Any:
        return self.queries(inputs["query"]), self.keys(inputs["key"])

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        queries, keys = y_pred
        mine, before = tf.shape(queries)[0], 0
        if self.gathers:
            counts = hvdtrain.all_gather(tf.reshape(mine, [1]))
            before = tf.reduce_sum(counts[: hvdtrain.rank()])
            keys = hvdtrain.all_gather(keys)
        scores = tf.matmul(queries, keys, transpose_b=True)
        partners = before + tf.range(mine)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=partners, logits=scores))


def built(model: keras.Model) -> keras.Model:
    model(X[:2])
    return model


def check_own_numbers_count_as_in_keras(world: World) -> None:
    for loss in (mean, total, of_strategies):
        assert_trained_as_keras(
            world,
            lambda loss=loss: built(OwnStep(loss)),
            lambda: {"optimizer": sgd()},
            lambda: {"x": data(), "validation_data": data(), "epochs": 2},
        )


@worlds("mpirun-2", "gloo-4", extended=True, why="the same for other places that form losses")
def check_losses_of_other_places_count_as_in_keras(world: World) -> None:
    compiled = {"optimizer": sgd, "loss": lambda: "mse"}
    cases: dict[str, tuple[Callable[[], keras.Model], list[str], dict[str, Any]]] = {
        "sum in slices of the optimizer": (lambda: built(OwnStep(total)), ["optimizer"], {"zero": 1}),
        "one for each sample": (lambda: built(OwnStep(squares_at_a_tenth)), ["optimizer"], {}),
        "compute_loss, a sum": (lambda: built(OwnLoss(total)), ["optimizer"], {}),
        "compute_loss, a mean": (lambda: built(OwnLoss(mean)), ["optimizer"], {}),
        "compute_loss, beside Keras'": (lambda: built(OwnLoss(mean, beside_compiled=True)), ["optimizer", "loss"], {}),
        "a layer's mean": (observed, ["optimizer", "loss"], {}),
    }
    for name, (build, settings, options) in cases.items():
        try:
            assert_trained_as_keras(
                world,
                build,
                lambda settings=settings: {setting: compiled[setting]() for setting in settings},
                lambda: {"x": data(), "validation_data": data(), "epochs": 2},
                options=options,
            )
        except Exception as error:
            error.add_note(name)
            raise


def squares_at_a_tenth(targets: Any, outputs: Any) -> tf.Tensor:
    return 0.1 * squares(targets, outputs)


def observed() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(Observed()(inputs)))


class Largest(keras.layers.Layer):
    """Watches the range of what it sees, as for quantization."""

    def __init__(self, aggregation: str | None = None) -> None:
        super().__init__()
        self.asked = aggregation

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen", aggregation=self.asked)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign(tf.maximum(self.seen, tf.reduce_max(tf.abs(inputs))))
        return inputs


@worlds("mpirun-2", extended=True, why="a state that layers update from samples")
def check_states_are_those_of_the_batch_or_what_a_layer_says(world: World) -> None:
    def trained(aggregation: str | None, *, whole_batch: bool) -> float:
        inputs = keras.Input((4,))
        layer = Largest(aggregation)
        model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
        hvdtrain.Trainer(model, sgd(), "mse", backend=world.backend, whole_batch=whole_batch).fit(
            X[:20], Y[:20], batch=20, epochs=1, shuffle=False, verbose=0
        )
        return float(layer.seen)

    largest = np.abs(X[:20]).max(1)
    shares = np.array_split(largest, world.size)
    with computing_in("float64"):
        found = (
            trained(None, whole_batch=True),
            trained("only_first_replica", whole_batch=False),
            trained("mean", whole_batch=False),
        )
    assert_same(found, (largest.max(), shares[0].max(), np.mean([share.max() for share in shares])), "states")


@worlds("mpirun-2", "gloo-4", extended=True, why="sums in a step with several optimizers")
def check_sums_of_several_optimizers_count_as_in_keras(world: World) -> None:
    def built_one() -> Adversarial:
        model = Adversarial()
        model(X[:2])
        return model

    assert_trained_as_keras(
        world,
        built_one,
        lambda: {"first": sgd(), "second": sgd()},
        lambda: {"x": tf.data.Dataset.from_tensor_slices(X).batch(BATCH), "epochs": 2},
    )


def check_negatives_of_all_ranks_are_those_of_one_process(world: World) -> None:
    pairs = {"query": X, "key": X * Y}

    def trained(*, gathers: bool) -> tuple[list[np.ndarray], Any, list[str]]:
        model = Towers(gathers=gathers)
        model({name: values[:2] for name, values in pairs.items()})
        model.compile(sgd())
        batches = tf.data.Dataset.from_tensor_slices(pairs).batch(BATCH)
        if not gathers:
            return [model.fit(batches, epochs=2, verbose=0).history, model.get_weights(), []]
        trainer = hvdtrain.Trainer(model, backend=world.backend)
        history = trainer.fit(batches, epochs=2, verbose=0).history
        return [history, model.get_weights(), trainer.factory.warnings]

    with computing_in("float64"):
        *expected, _ = trained(gathers=False)
        *found, warnings = trained(gathers=True)
    assert_same(found, expected, "history and weights")
    assert not warnings
