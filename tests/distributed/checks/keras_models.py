"""Models as Keras users write them, against Keras' own training of the whole batch in one process."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from world import World, computing_in, exact_arrays, flat_bytes, moved, relative_error
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


@computing_in("float64")
def compare(
    world: World,
    build: Callable[[], keras.Model],
    data: tuple[Any, ...],
    *,
    loss: Any = CROSSENTROPY,
    optimizer: Callable[[], Any] = sgd,
    accumulate: tuple[int, ...] = (1, 2),
    class_weight: Any = None,
    tolerance: float = 1e-9,
    **compile_options: Any,
) -> None:
    """Train on all ranks, with and without accumulation, and by Keras on one; the weights must agree."""
    inputs, targets, *weights = data
    keras.utils.set_random_seed(0)
    reference = build()
    reference(tf.nest.map_structure(lambda array: array[:1], inputs))
    start = reference.get_weights()
    reference.compile(optimizer(), loss, jit_compile=False, **compile_options)
    reference.fit(
        inputs,
        targets,
        sample_weight=weights[0] if weights else None,
        class_weight=class_weight,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )
    expected = reference.get_weights()
    assert moved(expected, start) >= 1e-2
    for pieces in accumulate:
        keras.utils.set_random_seed(world.rank)
        model = build()
        options = {"accumulate": pieces} if pieces > 1 else {}
        trainer = hvdtrain.Trainer(model, optimizer(), loss, backend=world.backend, **compile_options, **options)
        trainer.fit(
            data, batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False, class_weight=class_weight, log_every=1
        )
        assert world.same_everywhere(flat_bytes(model.get_weights())), "the ranks' weights differ"
        error = relative_error(model.get_weights(), expected)
        assert error <= tolerance, f"accumulate={pieces}: {error:.2e}"


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


@keras.saving.register_keras_serializable(package="tests")
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
    compare(world, sequential, (X, LABELS, WEIGHTS))
    compare(world, sequential, (X, LABELS), class_weight={0: 1.0, 1: 3.0, 2: 0.5}, accumulate=(2,))
    one_hot = np.eye(3)[LABELS]
    crossentropy = keras.losses.CategoricalCrossentropy(from_logits=True, dtype="float64")
    compare(world, sequential, (X, one_hot), loss=crossentropy, class_weight={1: 2.0}, accumulate=(1,))


@worlds("mpirun-2", extended=True)
def check_two_outputs_by_name(world: World) -> None:
    losses = {"label": CROSSENTROPY, "value": SQUARES}
    targets = {"label": LABELS, "value": VALUES}
    compare(world, functional_with_two_heads, (X, targets), loss=losses, loss_weights={"label": 1.0, "value": 0.2})


@worlds("mpirun-2", extended=True)
def check_two_inputs_and_outputs_in_lists(world: World) -> None:
    data = ([X[:, :3], X[:, 3:]], [LABELS, VALUES])
    compare(world, functional_with_two_inputs, data, loss=[CROSSENTROPY, SQUARES], loss_weights=[1.0, 0.2])


@worlds("mpirun-2", extended=True)
def check_added_losses_and_frozen_layers(world: World) -> None:
    # An added mean over the batch is one over each microbatch with accumulation: equal parts add up to the same,
    # the short one of an uneven tail counts as much as it has samples.
    compare(world, Subclassed, (X[:64], LABELS[:64]))


class OwnStep(keras.Model):
    """A train_step as the Keras guides have it, with clipping by hand and a metric of its own."""

    def __init__(self) -> None:
        super().__init__(dtype="float64")
        self.hidden = dense(16, activation="tanh")
        self.out = dense(3)
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs))

    def train_step(self, data: Any) -> dict[str, Any]:
        inputs, targets = data
        with tf.GradientTape() as tape:
            outputs = self(inputs, training=True)
            loss = self.compute_loss(y=targets, y_pred=outputs)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.seen.update_state(tf.ones(tf.shape(inputs)[0]))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=tf.shape(inputs)[0])
        return {metric.name: metric.result() for metric in self.metrics}


@worlds("mpirun-2", extended=True)
def check_a_train_step_of_its_own(world: World) -> None:
    compare(world, OwnStep, (X, LABELS), accumulate=(1,))
    model = OwnStep()
    trainer = hvdtrain.Trainer(model, sgd(), CROSSENTROPY, backend=world.backend)
    result = trainer.fit((X, LABELS), batch=BATCH, epochs=2, validation_data=(X, LABELS), verbose=False)
    logits = model.predict(X, verbose=0)
    expected = float(CROSSENTROPY(LABELS, logits))
    assert abs(result.evaluations[-1].loss - expected) <= 1e-6 * expected, (result.evaluations[-1].loss, expected)


@worlds("mpirun-2", extended=True)
def check_dropout_differs_by_rank_and_is_reproducible(world: World) -> None:
    def trained() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        layers = [dense(32, activation="tanh"), keras.layers.Dropout(0.5, seed=3, dtype="float64"), dense(3)]
        model = keras.Sequential([keras.Input((6,), dtype="float64"), *layers])
        trainer = hvdtrain.Trainer(model, sgd(), CROSSENTROPY, backend=world.backend, seed=5, accumulate=2)
        trainer.fit((X, LABELS), batch=BATCH, epochs=1, shuffle=False, verbose=False)
        assert world.same_everywhere(flat_bytes(model.get_weights()))
        return model.get_weights()

    for first, again in zip(trained(), trained(), strict=True):
        # Above two ranks the order of a sum depends on what is sent together.
        np.testing.assert_allclose(first, again, rtol=0.0 if world.size <= 2 else 1e-9)

    class Recording(keras.layers.Layer):
        """Keeps the masks of a dropout of ones."""

        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.drop = keras.layers.Dropout(0.5, seed=3, dtype="float64")
            # A tf.Variable is no part of the model's state, which is averaged over the ranks at the end.
            self.kept = tf.Variable(tf.zeros((16 // world.size, 6), "float64"), trainable=False)

        def call(self, inputs: Any, training: bool = False) -> Any:
            mask = self.drop(tf.ones_like(inputs), training=training)
            if training:
                self.kept.assign(mask)
            return inputs * mask

    layer = Recording()
    model = keras.Sequential([keras.Input((6,), dtype="float64"), layer, dense(3)])
    trainer = hvdtrain.Trainer(model, sgd(), CROSSENTROPY, backend=world.backend)
    data = hvdtrain_data(trainer)
    trainer.build(data)
    from hvdtrain.training.loop.loop import Plan

    trainer.train(data, Plan(1))
    masks = world.gather(layer.kept.numpy().tobytes())
    if world.size > 1:
        assert len(set(masks)) == world.size, "two ranks drew the same dropout mask"


def hvdtrain_data(trainer: Any) -> Any:
    from hvdtrain.training.inputs import training_data

    backend = trainer.backend
    return training_data((X[:16], LABELS[:16]), backend, batch=16, seed=0, shuffle=False, steps_per_epoch=None)


@worlds("mpirun-2", extended=True)
def check_metrics_of_two_outputs_over_all_ranks(world: World) -> None:
    model = functional_with_two_heads()
    losses = {"label": CROSSENTROPY, "value": "mse"}
    trainer = hvdtrain.Trainer(
        model,
        sgd(),
        losses,
        {"label": ["accuracy"], "value": ["mae"]},
        weighted_metrics={"value": [keras.metrics.MeanAbsoluteError(name="weighted_mae")]},
        backend=world.backend,
    )
    data = (X, {"label": LABELS, "value": VALUES}, {"label": WEIGHTS, "value": WEIGHTS})
    outcome = trainer.evaluate(data, batch=13)
    model.compile(
        sgd(),
        losses,
        metrics={"label": ["accuracy"], "value": ["mae"]},
        weighted_metrics={"label": [], "value": ["mae"]},
    )
    outputs = model.predict(X, verbose=0)
    right = (outputs["label"].argmax(1) == LABELS).mean()
    errors = np.abs(outputs["value"] - VALUES)[:, 0]
    np.testing.assert_allclose(outcome.metrics["label_accuracy"], right, rtol=1e-6)
    np.testing.assert_allclose(outcome.metrics["value_mae"], errors.mean(), rtol=1e-6)
    np.testing.assert_allclose(
        outcome.metrics["value_weighted_mae"], (errors * WEIGHTS).sum() / WEIGHTS.sum(), rtol=1e-6
    )


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_predictions_are_in_order(world: World) -> None:
    model = functional_with_two_heads()
    trainer = hvdtrain.Trainer(model, sgd(), {"label": CROSSENTROPY, "value": "mse"}, backend=world.backend)
    for count, batch in ((70, 13), (3, 16), (1, 4)):
        mine = trainer.predict(X[:count], batch=batch)
        plain = model(X[:count], training=False)
        for name in ("label", "value"):
            np.testing.assert_allclose(mine[name], plain[name], rtol=1e-12, atol=1e-12)
    dataset = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(11)
    np.testing.assert_allclose(
        trainer.predict(dataset)["label"], model(X, training=False)["label"], rtol=1e-12, atol=1e-12
    )


@worlds("mpirun-2", extended=True)
def check_statistics_are_averaged_though_nothing_is_validated(world: World) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
    trainer = hvdtrain.Trainer(model, sgd(), CROSSENTROPY, backend=world.backend)
    trainer.fit((X, LABELS), batch=BATCH, epochs=2, shuffle=False, verbose=False, log_every=1)
    assert world.same_everywhere(flat_bytes(model.get_weights()))


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
            SummedStep(), keras.optimizers.SGD(rate), CROSSENTROPY, backend=world.backend, reduce_op=op
        )
        trainer.fit((X[:3], LABELS[:3]), batch=4, epochs=3, shuffle=False, verbose=False, log_every=1)
        assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
        weights.append(trainer.model.get_weights())
    assert relative_error(*weights) <= 1e-9
