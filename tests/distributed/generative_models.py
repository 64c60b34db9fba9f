"""Generative models with a `train_step` of their own, as Keras users write them.

Where they would draw noise, it is a function of the inputs here: what is drawn differs by rank, and a batch on several
ranks could not be compared with the same batch on one.
"""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

FEATURES, LATENT, CLASSES = 4, 3, 2


def net(inputs: int, outputs: int, **options: Any) -> keras.Model:
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(outputs, **options)]
    return keras.Sequential([keras.Input((inputs,)), *layers])


def noise_like(values: Any, columns: int) -> Any:
    """Numbers that look drawn, of each sample's own."""
    rows = ops.sum(values, axis=1, keepdims=True)
    return ops.sin(37.0 * rows + ops.reshape(ops.arange(columns, dtype=rows.dtype), (1, columns)))


class GAN(keras.Model):
    """Two optimizers of its own, `super().compile()` without any, inputs alone, metrics as a property."""

    def __init__(self, discriminator: Any, generator: Any) -> None:
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real: Any) -> dict[str, Any]:
        count = ops.shape(real)[0]
        noise = noise_like(real, LATENT)
        combined = ops.concatenate([self.generator(noise), real], axis=0)
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((count, 1)), self.discriminator(self.generator(noise)))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class WGAN(keras.Model):
    """Several steps of the critic for one of the generator, a penalty on the gradient of inputs, no metrics."""

    def __init__(self, discriminator: Any, generator: Any, discriminator_extra_steps: int = 3) -> None:
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.d_steps = discriminator_extra_steps
        self.gp_weight = 10.0

    def compile(self, d_optimizer: Any, g_optimizer: Any, d_loss_fn: Any, g_loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.d_loss_fn = d_loss_fn
        self.g_loss_fn = g_loss_fn

    def gradient_penalty(self, real: Any, fake: Any) -> Any:
        alpha = ops.square(noise_like(real, 1))
        interpolated = real + alpha * (fake - real)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = ops.sqrt(ops.sum(ops.square(grads), axis=1))
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, real: Any) -> dict[str, Any]:
        if isinstance(real, tuple):
            real = real[0]
        noise = noise_like(real, LATENT)
        for _ in range(self.d_steps):
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                fake_logits = self.discriminator(fake, training=True)
                real_logits = self.discriminator(real, training=True)
                cost = self.d_loss_fn(real_img=real_logits, fake_img=fake_logits)
                d_loss = cost + self.gradient_penalty(real, fake) * self.gp_weight
            grads = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_variables, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.g_loss_fn(self.discriminator(self.generator(noise, training=True), training=True))
        grads = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_variables, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


class DiffusionModel(keras.Model):
    """A denoiser with a normalizer of its own and an average of the network's weights, which `test_step` uses."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.normalizer = keras.layers.Normalization()
        self.network = network
        self.ema_network = keras.models.clone_model(network)
        self.ema_network.set_weights(network.get_weights())

    def compile(self, **kwargs: Any) -> None:
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")
        self.image_loss_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.noise_loss_tracker, self.image_loss_tracker]

    def denoise(self, images: Any, *, training: bool) -> tuple[Any, Any]:
        images = self.normalizer(images)
        noises = noise_like(images, FEATURES)
        network = self.network if training else self.ema_network
        times = 0.5 + 0.4 * noise_like(images, 1)
        noisy = times * images + (1.0 - times) * noises
        predicted = network(ops.concatenate([noisy, times], axis=1), training=training)
        return self.loss(noises, predicted), self.loss(images, (noisy - (1.0 - times) * predicted) / times)

    def train_step(self, images: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            noise_loss, image_loss = self.denoise(images, training=True)
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.noise_loss_tracker.update_state(noise_loss)
        self.image_loss_tracker.update_state(image_loss)
        for weight, ema_weight in zip(self.network.weights, self.ema_network.weights, strict=True):
            ema_weight.assign(0.9 * ema_weight + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, images: Any) -> dict[str, Any]:
        noise_loss, image_loss = self.denoise(images, training=False)
        self.noise_loss_tracker.update_state(noise_loss)
        self.image_loss_tracker.update_state(image_loss)
        return {m.name: m.result() for m in self.metrics}
