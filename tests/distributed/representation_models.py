"""Contrastive, distilled and other models with a `train_step` of their own, as Keras users write them."""

from typing import Any

import keras
import tensorflow as tf
from generative_models import CLASSES, FEATURES, net
from keras import ops


class Contrastive(keras.Model):
    """An encoder trained by two views of unlabeled samples, and a probe by labeled ones; two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = net(FEATURES, 6, activation="tanh")
        self.projection_head = net(6, 4)
        self.linear_probe = keras.Sequential([keras.Input((6,)), keras.layers.Dense(CLASSES)])

    def compile(self, contrastive_optimizer: Any, probe_optimizer: Any, **kwargs: Any) -> None:
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self) -> list[Any]:
        return [self.contrastive_loss_tracker, self.probe_loss_tracker, self.probe_accuracy]

    def contrastive_loss(self, projections_1: Any, projections_2: Any) -> Any:
        """Each sample against all others of the batch: of the rank's own slice of it."""
        one, two = ops.normalize(projections_1, axis=1), ops.normalize(projections_2, axis=1)
        similarities = ops.matmul(one, ops.transpose(two)) / 0.5
        labels = ops.arange(ops.shape(one)[0])
        loss = keras.losses.sparse_categorical_crossentropy
        return ops.mean(loss(labels, similarities, from_logits=True))

    def train_step(self, data: Any) -> dict[str, Any]:
        (unlabeled, _), (labeled, labels) = data
        with tf.GradientTape() as tape:
            features_1, features_2 = self.encoder(unlabeled * 1.1), self.encoder(unlabeled * 0.9 + 0.1)
            loss = self.contrastive_loss(self.projection_head(features_1), self.projection_head(features_2))
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.contrastive_loss_tracker.update_state(loss)
        with tf.GradientTape() as tape:
            logits = self.linear_probe(self.encoder(labeled, training=False))
            probe_loss = self.probe_loss(labels, logits)
        weights = self.linear_probe.trainable_weights
        self.probe_optimizer.apply_gradients(zip(tape.gradient(probe_loss, weights), weights, strict=True))
        self.probe_loss_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data: Any) -> dict[str, Any]:
        labeled, labels = data
        logits = self.linear_probe(self.encoder(labeled, training=False), training=False)
        self.probe_loss_tracker.update_state(self.probe_loss(labels, logits))
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics[1:]}


class Distiller(keras.Model):
    """A `compute_loss` of its own in Keras' own step: the student learns from labels and from a frozen teacher."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.teacher = teacher
        self.teacher.trainable = False
        self.student = student

    def compile(
        self,
        optimizer: Any,
        metrics: Any,
        student_loss_fn: Any,
        distillation_loss_fn: Any,
        alpha: float = 0.1,
        temperature: float = 3.0,
    ) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, allow_empty: bool = False
    ) -> Any:
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        soft = [ops.softmax(each / self.temperature, axis=1) for each in (teacher_pred, y_pred)]
        distillation_loss = self.distillation_loss_fn(*soft) * self.temperature**2
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x: Any) -> Any:
        return self.student(x)


class Weighted(keras.Model):
    """Sample weights unpacked by hand, compiled loss and metrics, gradients clipped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(FEATURES, CLASSES)

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, sample_weight = data if len(data) == 3 else (*data, None)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=ops.shape(x)[0])
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {m.name: m.result() for m in self.metrics}


class BYOL(keras.Model):
    """An online network that predicts what a slow copy of it makes of another view; nothing is tracked."""

    def __init__(self) -> None:
        super().__init__()
        self.online = net(FEATURES, 4)
        self.target = net(FEATURES, 4)
        self.target.set_weights(self.online.get_weights())
        self.target.trainable = False
        self.predictor = net(4, 4)

    @tf.function
    def train_step(self, data: Any) -> dict[str, Any]:
        (views,) = data
        with tf.GradientTape() as tape:
            predicted = ops.normalize(self.predictor(self.online(views * 1.1)), axis=1)
            seen = ops.normalize(self.target(views * 0.9 + 0.1), axis=1)
            loss = ops.mean(2.0 - 2.0 * ops.sum(predicted * seen, axis=1))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for slow, fast in zip(self.target.weights, self.online.weights, strict=True):
            slow.assign(0.95 * slow + 0.05 * fast)
        return {"similarity_loss": loss}
