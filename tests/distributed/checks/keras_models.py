"""Models as Keras users write them, against Keras' own training of the whole batch in one process."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from as_keras import assert_same, assert_trained_as_keras
from world import World, computing_in, flat_bytes, relative_error
from worlds import worlds

import hvdtrain

RNG = np.random.default_rng(21)
SAMPLES, BATCH, EPOCHS = 70, 16, 4  # four full batches and one of 6: 20 steps
X = RNG.standard_normal((SAMPLES, 6))
LABELS = np.argmax(X[:, :3] + 0.3 * RNG.standard_normal((SAMPLES, 3)), axis=1)
VALUES = X[:, :2].sum(axis=1, keepdims=True) ** 2
WEIGHTS = RNG.random(SAMPLES) + 0.5
# Keras computes a loss in its own dtype, whatever that of the outputs.
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
SQUARES = keras.losses.MeanSquaredError(dtype="float64")


def dense(units: int, **options: Any) -> Any:
    return keras.layers.Dense(units, dtype="float64", **options)


def sgd() -> Any:
    # Keras keeps the rate in its floatx; this one is the same number in all of them.
    return keras.optimizers.SGD(0.0625, momentum=0.9)


def compare(
    world: World,
    build: Callable[[], keras.Model],
    objective: Mapping[str, Any],
    data: Mapping[str, Any],
    *,
    accumulate: int = 1,
    **looks: Callable[[], Mapping[str, Any]],
) -> hvdtrain.Trainer:
    """Train 20 steps on all ranks, and by Keras on one; `looks` are arguments of `evaluate` and `predict`."""

    def built() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = build()
        model(tf.nest.map_structure(lambda array: array[:1], data["x"]))
        return model

    training = {**data, "batch_size": BATCH, "epochs": EPOCHS, "shuffle": False}
    options = {"accumulate": accumulate}
    return assert_trained_as_keras(
        world, built, lambda: {"optimizer": sgd(), **objective}, lambda: training, options=options, **looks
    )


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((6,), dtype="float64"), dense(16, activation="tanh"), dense(3)])


def functional_with_two_heads() -> keras.Model:
    inputs = keras.Input((6,), dtype="float64", name="x")
    hidden = dense(16, activation="tanh")(inputs)
    label = dense(3, name="label")(hidden)
    value = dense(1, name="value")(hidden)
    return keras.Model(inputs, {"label": label, "value": value})


def functional_with_two_inputs() -> keras.Model:
    left, right = (keras.Input((3,), dtype="float64", name=name) for name in ("left", "right"))
    shared = dense(8, activation="tanh")
    joined = keras.layers.Concatenate(dtype="float64")([shared(left), shared(right)])
    return keras.Model([left, right], [dense(3, name="a")(joined), dense(1, name="b")(joined)])


class Subclassed(keras.Model):
    """Regularized, with a loss that it adds by itself and a frozen layer."""

    def __init__(self) -> None:
        super().__init__(dtype="float64")
        self.hidden = dense(16, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
        self.frozen = dense(16, trainable=False)
        self.out = dense(3)

    def call(self, inputs: Any) -> Any:
        hidden = self.hidden(inputs)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(hidden)))
        return self.out(self.frozen(hidden))


@worlds("mpirun-2", extended=True)
def check_sequential_with_sample_and_class_weights(world: World) -> None:
    categorical = keras.losses.CategoricalCrossentropy(from_logits=True, dtype="float64")
    for loss, more, accumulate in (
        (CROSSENTROPY, {"y": LABELS, "sample_weight": WEIGHTS}, 2),
        (CROSSENTROPY, {"y": LABELS, "class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}, 2),
        (categorical, {"y": np.eye(3)[LABELS], "class_weight": {1: 2.0}}, 1),
    ):
        compare(world, sequential, {"loss": loss}, {"x": X, **more}, accumulate=accumulate)


@worlds("mpirun-2", extended=True)
@computing_in("float64")
def check_two_outputs_by_name(world: World) -> None:
    """Weights of losses and samples, metrics of both kinds; evaluated and predicted, also of one sample."""
    objective = {
        "loss": {"label": CROSSENTROPY, "value": SQUARES},
        "loss_weights": {"label": 1.0, "value": 0.2},
        "metrics": {"label": ["accuracy"], "value": ["mae"]},
        "weighted_metrics": {"label": [], "value": ["mae"]},
    }
    weights = {"label": WEIGHTS, "value": WEIGHTS}
    data = {"x": X, "y": {"label": LABELS, "value": VALUES}, "sample_weight": weights}
    for accumulate in (1, 2):
        trainer = compare(
            world,
            functional_with_two_heads,
            objective,
            data,
            accumulate=accumulate,
            evaluate=lambda: {**data, "batch_size": 13, "return_dict": True},
            predict=lambda: {"x": X, "batch_size": 13},
        )
    for count in (3, 1):
        assert_same(trainer.predict(X[:count], batch=4), trainer.model(X[:count]), f"{count} samples")


@worlds("mpirun-2", extended=True)
def check_two_inputs_and_outputs_in_lists(world: World) -> None:
    objective = {"loss": [CROSSENTROPY, SQUARES], "loss_weights": [1.0, 0.2]}
    data = {"x": [X[:, :3], X[:, 3:]], "y": [LABELS, VALUES]}
    compare(world, functional_with_two_inputs, objective, data, accumulate=2)


@worlds("mpirun-2", extended=True)
def check_added_losses_and_frozen_layers(world: World) -> None:
    # An added mean over the batch is one over each microbatch with accumulation: equal parts add up to the same,
    # the short one of an uneven tail counts as much as it has samples.
    compare(world, Subclassed, {"loss": CROSSENTROPY}, {"x": X[:64], "y": LABELS[:64]}, accumulate=2)


@worlds("mpirun-2", extended=True)
def check_predictions_in_16_bits(world: World) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, dtype="bfloat16")])
    trainer = hvdtrain.Trainer(model, sgd(), CROSSENTROPY, backend=world.backend)
    predicted = trainer.predict(X.astype("float32"), batch=16)
    np.testing.assert_array_equal(predicted, np.array(model(X.astype("float32")), predicted.dtype))


class SummedStep(keras.Model):
    """A train_step of its own that hands the mean gradient of its part to the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense_layer = dense(3)

    def call(self, inputs: Any) -> Any:
        return self.dense_layer(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@worlds("mpirun-2", extended=True)
def check_a_train_step_of_its_own_may_sum(world: World) -> None:
    """Three samples: on four ranks one holds a placeholder, on two the parts differ."""
    weights = []
    for op, rate in (("average", 0.5), ("sum", 0.5 / world.size)):
        keras.utils.set_random_seed(0)
        trainer = hvdtrain.Trainer(
            SummedStep(),
            keras.optimizers.SGD(rate),
            CROSSENTROPY,
            backend=world.backend,
            reduce_op=op,
            whole_batch=False,
        )
        trainer.fit((X[:3], LABELS[:3]), batch=4, epochs=3, shuffle=False, verbose=False, log_every=1)
        assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
        weights.append(trainer.model.get_weights())
    assert relative_error(*weights) <= 1e-9
