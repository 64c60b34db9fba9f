"""The models of keras.io's developer guides, written as the guides write them, by Keras and by the trainer."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from as_keras import assert_same, assert_trained_as_keras
from keras import layers, ops
from world import World, computing_in
from worlds import worlds

import hvdtrain

RNG = np.random.default_rng(0)
SAMPLES = 22
"""Batches of 8 leave an uneven rest."""
ROWS, LABELS = RNG.random((SAMPLES, 6)), RNG.integers(0, 3, SAMPLES)
IMAGES, SERIES = RNG.random((SAMPLES, 8, 8, 3)), RNG.random((SAMPLES, 5, 4))
TOKENS = RNG.integers(1, 9, (SAMPLES, 7)) * (np.arange(7) < RNG.integers(2, 8, (SAMPLES, 1)))
FIT: Mapping[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False}

Build = Callable[[], keras.Model]
Compiled = Callable[[], Mapping[str, Any]]


def compare(world: World, build: Build, compiled: Compiled, **data: Any) -> None:
    """Compare training, evaluation and prediction."""

    def built() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = build()
        model(tf.nest.map_structure(lambda array: array[:1], data["x"]))
        return model

    both = {name: value for name, value in data.items() if name in ("x", "y", "sample_weight")}
    assert_trained_as_keras(
        world,
        built,
        compiled,
        lambda: {**FIT, **data},
        evaluate=lambda: {**both, "batch_size": 8},
        predict=lambda: {"x": data["x"], "batch_size": 8},
    )


def sparse(optimizer: Any = None, **options: Any) -> Mapping[str, Any]:
    """Return arguments of `compile` for labels and logits."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"optimizer": optimizer or keras.optimizers.Adam(), "loss": loss, **options}


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=4, decay_rate=0.9))


# -- training and evaluation with the built-in methods --


class CategoricalTruePositives(keras.metrics.Metric):
    def __init__(self, name: str = "categorical_true_positives", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.true_positives = self.add_weight(name="ctp", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        y_pred = ops.reshape(ops.argmax(y_pred, axis=1), (-1, 1))
        values = ops.cast(ops.cast(ops.reshape(y_true, (-1, 1)), "int32") == ops.cast(y_pred, "int32"), "float32")
        if sample_weight is not None:
            values = ops.multiply(values, ops.reshape(ops.cast(sample_weight, "float32"), (-1, 1)))
        self.true_positives.assign_add(ops.cast(ops.sum(values), self.true_positives.dtype))

    def result(self) -> Any:
        return self.true_positives.value

    def reset_state(self) -> None:
        self.true_positives.assign(0)


class ActivityRegularizationLayer(layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(ops.sum(inputs) * 0.1)
        return inputs


class LogisticEndpoint(layers.Layer):
    """Computes its loss and its metric in `call`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy_metric = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, logits: Any, targets: Any = None, sample_weight: Any = None) -> Any:
        if targets is not None:
            self.add_loss(self.loss_fn(targets, logits, sample_weight))
            self.accuracy_metric.update_state(targets, logits, sample_weight)
        return ops.softmax(logits)


def classifier() -> keras.Model:
    inputs = keras.Input(shape=(6,), name="digits")
    x = layers.Dense(8, activation="relu", name="dense_1")(inputs)
    x = ActivityRegularizationLayer()(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="predictions")(x))


def endpoint() -> keras.Model:
    inputs, targets = keras.Input((6,), name="inputs"), keras.Input((1,), name="targets")
    logits = layers.Dense(1)(inputs)
    return keras.Model({"inputs": inputs, "targets": targets}, LogisticEndpoint(name="predictions")(logits, targets))


def two_heads() -> keras.Model:
    image, series = keras.Input((8, 8, 3), name="img_input"), keras.Input((None, 4), name="ts_input")
    x1 = layers.GlobalMaxPooling2D()(layers.Conv2D(3, 3)(image))
    x2 = layers.GlobalMaxPooling1D()(layers.Conv1D(3, 3)(series))
    x = layers.concatenate([x1, x2])
    return keras.Model([image, series], [layers.Dense(1, name="score")(x), layers.Dense(5, name="class_output")(x)])


def custom_mean_squared_error(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


@worlds("mpirun-2", "mpirun-1", extended=True)
def check_training_with_built_in_methods(world: World) -> None:
    named, weights = "sparse_categorical_accuracy", np.where(LABELS == 1, 2.0, 1.0)
    compare(world, classifier, lambda: sparse(sgd(), metrics=[named, CategoricalTruePositives()]), x=ROWS, y=LABELS)
    compare(world, classifier, lambda: sparse(metrics=[named]), x=ROWS, y=LABELS, validation_split=0.2)
    compare(world, classifier, lambda: sparse(sgd()), x=ROWS, y=LABELS, class_weight={0: 1.0, 1: 2.0, 2: 0.5})
    compare(world, classifier, lambda: sparse(weighted_metrics=[named]), x=ROWS, y=LABELS, sample_weight=weights)
    binary = {"inputs": ROWS, "targets": (LABELS > 0)[:, None].astype(float)}
    compare(world, endpoint, lambda: {"optimizer": sgd()}, x=binary)

    def of_two_heads() -> dict[str, Any]:
        loss = {
            "score": custom_mean_squared_error,
            "class_output": keras.losses.CategoricalCrossentropy(from_logits=True),
        }
        metrics = {"score": ["mape", "mae"], "class_output": ["categorical_accuracy"]}
        weights = {"score": 2.0, "class_output": 1.0}
        return {"optimizer": keras.optimizers.RMSprop(1e-3), "loss": loss, "metrics": metrics, "loss_weights": weights}

    targets = {"score": RNG.random((SAMPLES, 1)) + 0.5, "class_output": np.eye(5)[LABELS]}
    compare(world, two_heads, of_two_heads, x={"img_input": IMAGES, "ts_input": SERIES}, y=targets)


# -- layers and models by subclassing --


class Linear(layers.Layer):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    def build(self, input_shape: Any) -> None:
        self.w = self.add_weight(shape=(input_shape[-1], self.units), initializer="random_normal", trainable=True)
        self.b = self.add_weight(shape=(self.units,), initializer="random_normal", trainable=True)

    def call(self, inputs: Any) -> Any:
        return ops.matmul(inputs, self.w) + self.b


class MLPBlock(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear_1, self.linear_2, self.linear_3 = Linear(8), Linear(8), Linear(3)
        self.dense = layers.Dense(3, kernel_regularizer=keras.regularizers.L2(1e-3))

    def call(self, inputs: Any) -> Any:
        x = ops.relu(self.linear_1(inputs))
        return self.dense(self.linear_3(ops.relu(self.linear_2(x))))


class AutoEncoder(keras.Model):
    """The guide's variational autoencoder, without its draws."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = layers.Dense(8, activation="relu")
        self.mean, self.log_var = layers.Dense(3), layers.Dense(3)
        self.decode = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(6, activation="sigmoid")])

    def call(self, inputs: Any) -> Any:
        x = self.proj(inputs)
        mean, log_var = self.mean(x), self.log_var(x)
        self.add_loss(-0.5 * ops.mean(log_var - ops.square(mean) - ops.exp(log_var) + 1))
        return self.decode(mean + ops.exp(0.5 * log_var))


@worlds("mpirun-2", "mpirun-1", extended=True)
def check_subclassed_layers_and_models(world: World) -> None:
    compare(world, lambda: keras.Sequential([MLPBlock()]), lambda: sparse(sgd()), x=ROWS, y=LABELS)
    compare(world, AutoEncoder, lambda: {"optimizer": "adam", "loss": "mse"}, x=ROWS, y=ROWS)


# -- the functional API --


def toy_resnet() -> keras.Model:
    inputs = keras.Input((8, 8, 3), name="img")
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    block_1 = layers.MaxPooling2D(2)(x)
    x = layers.Conv2D(4, 3, activation="relu", padding="same")(block_1)
    block_2 = layers.add([layers.Conv2D(4, 3, activation="relu", padding="same")(x), block_1])
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(block_2)), name="toy_resnet")


def ensemble() -> keras.Model:
    def member() -> keras.Model:
        inputs = keras.Input((6,))
        return keras.Model(inputs, layers.Dense(1)(inputs))

    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.average([member()(inputs), member()(inputs), member()(inputs)]))


def shared_embedding() -> keras.Model:
    shared = layers.Embedding(9, 4)
    text_a, text_b = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    pooled = [layers.GlobalAveragePooling1D()(shared(text)) for text in (text_a, text_b)]
    return keras.Model([text_a, text_b], layers.Dense(1)(layers.concatenate(pooled)))


@worlds("mpirun-2", "mpirun-1", extended=True)
def check_functional_models(world: World) -> None:
    compare(world, toy_resnet, lambda: sparse(metrics=["acc"]), x=IMAGES, y=LABELS)
    numbers = LABELS[:, None].astype(float)
    compare(world, ensemble, lambda: {"optimizer": sgd(), "loss": "mse"}, x=ROWS, y=numbers)
    texts = [TOKENS, TOKENS[::-1]]
    compare(world, shared_embedding, lambda: {"optimizer": sgd(), "loss": "mse"}, x=texts, y=numbers)


# -- masking, and recurrent layers --


class TemporalSoftmax(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True

    def call(self, inputs: Any, mask: Any = None) -> Any:
        if mask is None:
            raise ValueError("`TemporalSoftmax` layer requires a previous layer to support masking.")
        weights = ops.exp(inputs) * ops.expand_dims(ops.cast(mask, inputs.dtype), -1)
        return weights / ops.sum(weights, axis=1, keepdims=True)


class MinimalCell(layers.Layer):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = self.state_size = units

    def build(self, input_shape: Any) -> None:
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units), initializer="uniform")
        self.recurrent_kernel = self.add_weight(shape=(self.units, self.units), initializer="uniform")

    def call(self, inputs: Any, states: Any) -> Any:
        output = ops.matmul(inputs, self.kernel) + ops.matmul(states[0], self.recurrent_kernel)
        return output, [output]


def masked() -> keras.Model:
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    x = TemporalSoftmax()(layers.Dense(4)(x))
    return keras.Model(inputs, layers.Dense(3)(layers.LSTM(5)(x)))


def encoder_decoder() -> keras.Model:
    encoder_input, decoder_input = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    _, *state = layers.LSTM(4, return_state=True, name="encoder")(layers.Embedding(9, 4)(encoder_input))
    x = layers.LSTM(4, name="decoder")(layers.Embedding(9, 4)(decoder_input), initial_state=state)
    return keras.Model([encoder_input, decoder_input], layers.Dense(3)(x))


def recurrent() -> keras.Model:
    rnn = layers.RNN(MinimalCell(4), return_sequences=True)
    return keras.Sequential([keras.Input((None, 4)), rnn, layers.Bidirectional(layers.LSTM(3)), layers.Dense(3)])


@worlds("mpirun-2", "mpirun-1", extended=True)
def check_masks_and_recurrent_layers(world: World) -> None:
    # Keras' adaptive optimizers square the repeated rows of an embedding one by one: SGD does not.
    compare(world, masked, lambda: sparse(sgd(), metrics=["accuracy"]), x=TOKENS, y=LABELS)
    compare(world, encoder_decoder, lambda: sparse(sgd()), x=[TOKENS, TOKENS[::-1]], y=LABELS)
    compare(world, recurrent, sparse, x=SERIES, y=LABELS)


# -- transfer learning --


@worlds("mpirun-2", "mpirun-1", extended=True)
def check_fine_tuning(world: World) -> None:
    """Train a head on a frozen base, then all of it at a low rate, compiled anew.

    `training=False` in the call of the base ends with its freezing: Keras' functional models hand `training` on.
    """

    def build() -> tuple[keras.Model, keras.Model]:
        keras.utils.set_random_seed(0)
        base = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization()])
        base.trainable = False
        inputs = keras.Input((8, 8, 3))
        x = layers.GlobalAveragePooling2D()(base(layers.Rescaling(2.0, -1.0)(inputs), training=False))
        return base, keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.0)(x)))

    targets = (LABELS > 0)[:, None].astype(float)
    with computing_in("float64"):
        pairs = [build(), build()]
        for stage, rate in enumerate((1e-2, 1e-3)):
            for base, model in pairs:
                base.trainable = stage == 1
                loss = keras.losses.BinaryCrossentropy(from_logits=True)
                model.compile(keras.optimizers.Adam(rate), loss, metrics=[keras.metrics.BinaryAccuracy()])
            (_, theirs), (_, ours) = pairs
            history = theirs.fit(IMAGES, targets, batch_size=8, epochs=2, shuffle=False, verbose=0).history
            trainer = hvdtrain.Trainer(ours, backend=world.backend, sync_batch_norm=stage == 1)
            result = trainer.fit(IMAGES, targets, batch=8, epochs=2, shuffle=False, verbose=0)
            assert_same(result.history, history, f"history of stage {stage}")
            assert_same(trainer.model.get_weights(), theirs.get_weights(), f"weights of stage {stage}")


# -- what happens in fit --


class CustomModel(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y, *weights = data
        sample_weight = weights[0] if weights else None
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data: Any) -> Any:
        x, y = data[:2]
        y_pred = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class LowerLevel(keras.Model):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.mae_metric]


@worlds("mpirun-2", "mpirun-1", extended=True)
def check_steps_of_the_guide_on_fit(world: World) -> None:
    def of(kind: type[keras.Model]) -> Build:
        inputs = keras.Input((6,))
        return kind(inputs, layers.Dense(1)(inputs))

    numbers, weights = LABELS[:, None].astype(float), RNG.random(SAMPLES)

    def own() -> dict[str, Any]:
        return {"optimizer": "adam", "loss": "mse", "metrics": ["mae"]}

    compare(world, lambda: of(CustomModel), own, x=ROWS, y=numbers)
    for kind, compiled, weighted in (
        (CustomModel, own, {"sample_weight": weights}),
        (LowerLevel, lambda: {"optimizer": "adam"}, {}),
    ):
        assert_trained_as_keras(
            world,
            lambda kind=kind: (keras.utils.set_random_seed(0), of(kind))[1],
            compiled,
            lambda weighted=weighted: {**FIT, "x": ROWS, "y": numbers, **weighted},
        )


# -- callbacks of one's own --


class EarlyStoppingAtMinLoss(keras.callbacks.Callback):
    def __init__(self, patience: int = 0) -> None:
        super().__init__()
        self.patience = patience
        self.best_weights: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.wait, self.best = 0, np.inf

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if np.less(logs["loss"], self.best):
            self.best, self.wait, self.best_weights = logs["loss"], 0, self.model.get_weights()
        else:
            self.wait += 1
            if self.wait >= self.patience:
                self.model.stop_training = True
                self.model.set_weights(self.best_weights)


class CustomLearningRateScheduler(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        self.model.optimizer.learning_rate = rate * (8.0 if epoch == 2 else 0.9)


@worlds("mpirun-2", "mpirun-1", extended=True)
def check_callbacks_of_the_guide(world: World) -> None:
    assert_trained_as_keras(
        world,
        lambda: (keras.utils.set_random_seed(0), keras.Sequential([keras.Input((6,)), layers.Dense(1)]))[1],
        lambda: {"optimizer": keras.optimizers.SGD(0.3), "loss": "mse", "metrics": ["mae"]},
        lambda: {
            **FIT,
            "x": ROWS,
            "y": LABELS[:, None].astype(float),
            "epochs": 8,
            "callbacks": [EarlyStoppingAtMinLoss(), CustomLearningRateScheduler()],
        },
    )
