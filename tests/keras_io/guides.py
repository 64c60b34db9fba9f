"""Keras' developer guides: steps, layers, losses and metrics of one's own."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.keras_io.training import BATCH, EPOCHS, SAMPLES, Loop, Training, classes, images, numbers


def customizing_fit():
    """Customizing `fit`: a `train_step` with `compute_loss` and the compiled metrics."""

    class CustomModel(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            trainable_vars = self.trainable_variables
            gradients = tape.gradient(loss, trainable_vars)
            self.optimizer.apply(gradients, trainable_vars)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

    inputs = keras.Input(shape=(6,))
    model = CustomModel(inputs, layers.Dense(1)(layers.Dense(8, activation="relu")(inputs)))
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    return Training(model=model, x=numbers(6), y=numbers(1, seed=3))


def going_lower_level():
    """Customizing `fit`, lower level: its own loss and trackers in `train_step` and `test_step`."""

    class CustomModel(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.loss_tracker = keras.metrics.Mean(name="loss")
            self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
            self.loss_fn = keras.losses.MeanSquaredError()

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.loss_fn(y, y_pred)
            trainable_vars = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, trainable_vars), trainable_vars)
            self.loss_tracker.update_state(loss)
            self.mae_metric.update_state(y, y_pred)
            return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

        def test_step(self, data):
            x, y = data
            y_pred = self(x, training=False)
            self.loss_tracker.update_state(self.loss_fn(y, y_pred))
            self.mae_metric.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

        @property
        def metrics(self):
            return [self.loss_tracker, self.mae_metric]

    inputs = keras.Input(shape=(6,))
    model = CustomModel(inputs, layers.Dense(1)(layers.Dropout(0.3)(layers.Dense(8, activation="relu")(inputs))))
    model.compile(optimizer=keras.optimizers.RMSprop(0.01))
    x, y = numbers(6), numbers(1, seed=3)
    return Training(model=model, x=x, y=y, fit={"validation_data": (x[:8], y[:8]), "validation_batch_size": 8})


def sample_and_class_weights():
    """Customizing `fit` with weights: `train_step` with `sample_weight`, weighted metrics, class weights."""

    class CustomModel(keras.Model):
        def train_step(self, data):
            if len(data) == 3:
                x, y, sample_weight = data
            else:
                sample_weight = None
                x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred, sample_weight=sample_weight)
            return {m.name: m.result() for m in self.metrics}

    inputs = keras.Input(shape=(6,))
    model = CustomModel(inputs, layers.Dense(3, activation="softmax")(layers.Dense(8, activation="relu")(inputs)))
    model.compile("adam", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    return Training(model=model, x=numbers(6), y=classes(3), fit={"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}})


def gradient_accumulation_by_hand():
    """Accumulating gradients in a `train_step`: variables of the step's own, applied by `tf.cond` every second step."""

    class GAModel(keras.Model):
        def __init__(self, n_gradients, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.n_gradients = tf.constant(n_gradients, dtype=tf.int32)
            self.n_acum_step = tf.Variable(0, dtype=tf.int32, trainable=False)
            self.gradient_accumulation = [
                tf.Variable(tf.zeros_like(v.value), trainable=False) for v in self.trainable_variables
            ]

        def train_step(self, data):
            self.n_acum_step.assign_add(1)
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            for accumulated, gradient in zip(self.gradient_accumulation, gradients, strict=True):
                accumulated.assign_add(gradient)
            tf.cond(tf.equal(self.n_acum_step, self.n_gradients), self.apply_accu_gradients, lambda: None)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

        def apply_accu_gradients(self):
            self.optimizer.apply_gradients(zip(self.gradient_accumulation, self.trainable_variables, strict=True))
            self.n_acum_step.assign(0)
            for accumulated in self.gradient_accumulation:
                accumulated.assign(tf.zeros_like(accumulated))

    inputs = keras.Input(shape=(6,))
    model = GAModel(2, inputs, layers.Dense(3)(layers.Dense(8, activation="relu")(inputs)))
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["sparse_categorical_accuracy"]
    )
    return Training(model=model, x=numbers(6), y=classes(3))


def activity_regularization_layer():
    """Layers by subclassing: a layer that calls `add_loss`, within plain `fit`."""

    class ActivityRegularizationLayer(layers.Layer):
        def __init__(self, rate=1e-2):
            super().__init__()
            self.rate = rate

        def call(self, inputs):
            self.add_loss(self.rate * ops.sum(inputs))
            return inputs

    inputs = keras.Input(shape=(6,))
    hidden = ActivityRegularizationLayer()(layers.Dense(8, activation="relu", kernel_regularizer="l2")(inputs))
    model = keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.2)(hidden)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return Training(model=model, x=numbers(6), y=classes(3))


def logistic_endpoint():
    """Endpoint layer: targets are inputs, the layer adds the loss and updates a metric."""

    class LogisticEndpoint(keras.layers.Layer):
        def __init__(self, name=None):
            super().__init__(name=name)
            self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
            self.metric = keras.metrics.BinaryAccuracy(name="accuracy")

        def call(self, targets, logits, sample_weights=None):
            loss = self.loss_fn(targets, logits, sample_weights)
            self.add_loss(loss)
            self.metric.update_state(targets, logits, sample_weights)
            return ops.softmax(logits)

    inputs = keras.Input(shape=(6,), name="inputs")
    targets = keras.Input(shape=(4,), name="targets")
    predictions = LogisticEndpoint(name="predictions")(targets, layers.Dense(4)(inputs))
    model = keras.Model(inputs=[inputs, targets], outputs=predictions)
    model.compile(optimizer="adam")
    return Training(model=model, x={"inputs": numbers(6), "targets": (numbers(4, seed=4) > 0).astype("float64")})


def custom_metric_and_loss():
    """Training with built-in methods: a metric and a loss of one's own, as classes."""

    class CategoricalTruePositives(keras.metrics.Metric):
        def __init__(self, name="categorical_true_positives", **kwargs):
            super().__init__(name=name, **kwargs)
            self.true_positives = self.add_variable(shape=(), name="ctp", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            y_pred = ops.reshape(ops.argmax(y_pred, axis=1), (-1, 1))
            values = ops.cast(y_true, "int32") == ops.cast(y_pred, "int32")
            values = ops.cast(values, "float64")
            if sample_weight is not None:
                values = ops.multiply(values, ops.cast(sample_weight, "float64"))
            self.true_positives.assign_add(ops.sum(values))

        def result(self):
            return self.true_positives.value

        def reset_state(self):
            self.true_positives.assign(0.0)

    class CustomMSE(keras.losses.Loss):
        def __init__(self, regularization_factor=0.1, name="custom_mse"):
            super().__init__(name=name)
            self.regularization_factor = regularization_factor

        def call(self, y_true, y_pred):
            mse = ops.mean(ops.square(y_true - y_pred), axis=-1)
            reg = ops.mean(ops.square(0.5 - y_pred), axis=-1)
            return mse + reg * self.regularization_factor

    inputs = keras.Input(shape=(6,))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(inputs))
    model.compile("rmsprop", CustomMSE(), metrics=[CategoricalTruePositives()])
    return Training(model=model, x=numbers(6), y=classes(3, 1))


def multi_output_own_losses():
    """Several inputs and outputs: a loss of one's own for one of them, a function with one number for the batch."""

    def spread(y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred)) + 0.1 * ops.std(y_pred)

    image_input = keras.Input(shape=(8, 8, 3), name="img_input")
    series_input = keras.Input(shape=(None, 5), name="ts_input")
    x1 = layers.GlobalMaxPooling2D()(layers.Conv2D(3, 3)(image_input))
    x2 = layers.GlobalMaxPooling1D()(layers.Conv1D(3, 3)(series_input))
    x = layers.concatenate([x1, x2])
    model = keras.Model(
        [image_input, series_input], [layers.Dense(1, name="score")(x), layers.Dense(5, name="classes")(x)]
    )
    model.compile(
        keras.optimizers.RMSprop(1e-3),
        loss={"score": spread, "classes": keras.losses.CategoricalCrossentropy(from_logits=True)},
        loss_weights={"score": 2.0, "classes": 1.0},
        metrics={"score": [keras.metrics.MeanAbsoluteError()]},
    )
    targets = {"score": numbers(1, seed=5), "classes": np.eye(5)[classes(5)]}
    return Training(model=model, x={"img_input": images(8, 3), "ts_input": numbers(7, 5)}, y=targets)


def end_to_end_vae():
    """Layers and models by subclassing: sampling layer, and the model adds its KL divergence in `call`."""

    class Sampling(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.seed_generator = keras.random.SeedGenerator(1337)

        def call(self, inputs):
            z_mean, z_log_var = inputs
            batch, dim = ops.shape(z_mean)[0], ops.shape(z_mean)[1]
            epsilon = keras.random.normal(shape=(batch, dim), seed=self.seed_generator)
            return z_mean + ops.exp(0.5 * z_log_var) * epsilon

    class Encoder(layers.Layer):
        def __init__(self, latent_dim=3, intermediate_dim=8, name="encoder", **kwargs):
            super().__init__(name=name, **kwargs)
            self.dense_proj = layers.Dense(intermediate_dim, activation="relu")
            self.dense_mean = layers.Dense(latent_dim)
            self.dense_log_var = layers.Dense(latent_dim)
            self.sampling = Sampling()

        def call(self, inputs):
            x = self.dense_proj(inputs)
            z_mean, z_log_var = self.dense_mean(x), self.dense_log_var(x)
            return z_mean, z_log_var, self.sampling((z_mean, z_log_var))

    class VariationalAutoEncoder(keras.Model):
        def __init__(self, original_dim, name="autoencoder", **kwargs):
            super().__init__(name=name, **kwargs)
            self.encoder = Encoder()
            self.decoder = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(original_dim, "sigmoid")])

        def call(self, inputs):
            z_mean, z_log_var, z = self.encoder(inputs)
            reconstructed = self.decoder(z)
            kl_loss = -0.5 * ops.mean(z_log_var - ops.square(z_mean) - ops.exp(z_log_var) + 1)
            self.add_loss(kl_loss)
            return reconstructed

    model = VariationalAutoEncoder(16)
    model.compile(keras.optimizers.Adam(learning_rate=1e-3), loss=keras.losses.MeanSquaredError())
    x = images(4).reshape(SAMPLES, 16)
    return Training(model=model, x=x, y=x)


def antirectifier():
    """Antirectifier: a layer of one's own that normalizes each sample by statistics."""

    class Antirectifier(layers.Layer):
        def build(self, input_shape):
            self.kernel = self.add_weight(
                shape=(input_shape[-1] * 2, input_shape[-1]), initializer="he_normal", name="kernel", trainable=True
            )

        def call(self, inputs):
            inputs -= ops.mean(inputs, axis=-1, keepdims=True)
            pos = ops.relu(inputs)
            neg = ops.relu(-inputs)
            concatenated = ops.concatenate([pos, neg], axis=-1)
            return ops.matmul(concatenated, self.kernel)

    model = keras.Sequential(
        [
            keras.Input(shape=(6,)),
            layers.Dense(8),
            Antirectifier(),
            layers.Dropout(0.5),
            layers.Dense(8),
            Antirectifier(),
            layers.Dense(3),
        ]
    )
    model.compile(
        keras.optimizers.RMSprop(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    x, y = numbers(6), classes(3)
    return Training(model=model, x=x, y=y, fit={"validation_split": 0.15})


def loop_from_scratch():
    """Writing a training loop from scratch: a step of the loop's own with metrics and the model's losses."""

    def run(steps):
        inputs = keras.Input(shape=(6,))
        hidden = layers.Dense(8, activation="relu", activity_regularizer="l2")(inputs)
        model = keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.2)(hidden)))
        optimizer = keras.optimizers.Adam(learning_rate=1e-2)
        optimizer.build(model.trainable_variables)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        train_acc_metric = keras.metrics.SparseCategoricalAccuracy()

        @steps.compiled
        def train_step(x, y):
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss_value = loss_fn(y, logits) + sum(model.losses)
            grads = tape.gradient(loss_value, model.trainable_weights)
            optimizer.apply(grads, model.trainable_weights)
            train_acc_metric.update_state(y, logits)
            return loss_value

        history = {"loss": [], "accuracy": []}
        x_train, y_train = numbers(6), classes(3)
        for _ in range(EPOCHS):
            for begin in range(0, SAMPLES, BATCH):
                loss = train_step(*steps.mine(x_train[begin : begin + BATCH], y_train[begin : begin + BATCH]))
                history["loss"].append(float(loss))
            history["accuracy"].append(float(train_acc_metric.result()))
            train_acc_metric.reset_state()
        return model.get_weights(), history

    return Loop(run)


EXAMPLES = (
    customizing_fit,
    going_lower_level,
    sample_and_class_weights,
    gradient_accumulation_by_hand,
    activity_regularization_layer,
    logistic_endpoint,
    custom_metric_and_loss,
    multi_output_own_losses,
    end_to_end_vae,
    antirectifier,
    loop_from_scratch,
)
