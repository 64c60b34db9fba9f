"""A generative adversarial network: a `train_step` of one's own with two optimizers, as it stands in Keras' guides.

    horovodrun -np 2 python examples/gan.py

Shows both losses; rank 0 writes digits.png, 16 generated digits, after each epoch: they look like digits after some 200
epochs. Both optimizers exchange their gradients; the model says nothing of ranks.
"""

import argparse

import hvdtrain

hvdtrain.init()

import keras
import tensorflow as tf
from keras import layers, ops

from hvdtrain.data.digits import load_digits

NOISE = 16


class GAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((NOISE,)), layers.Dense(128, "relu"), layers.Dense(64, "sigmoid"), layers.Reshape((8, 8, 1))]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(128, "leaky_relu"), layers.Dense(1)]
        )
        self.seeds = keras.random.SeedGenerator(1)
        self.means = {name: keras.metrics.Mean(name=name) for name in ("d_loss", "g_loss")}

    def compile(self, d_optimizer, g_optimizer, loss):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss

    @property
    def metrics(self):
        return list(self.means.values())

    def train_step(self, images):
        count = ops.shape(images)[0]
        noise = keras.random.normal((count, NOISE), seed=self.seeds)
        true, false = ops.ones((count, 1)), ops.zeros((count, 1))
        with tf.GradientTape() as tape:
            made = self.discriminator(self.generator(noise))
            d_loss = (self.loss_fn(true, self.discriminator(images)) + self.loss_fn(false, made)) / 2
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(true, self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        for name, value in (("d_loss", d_loss), ("g_loss", g_loss)):
            self.means[name].update_state(value)
        return {name: mean.result() for name, mean in self.means.items()}


class Pictures(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if hvdtrain.rank() == 0:
            made = ops.reshape(self.model.generator(keras.random.normal((16, NOISE), seed=1)), (4, 4, 8, 8))
            keras.utils.save_img("digits.png", ops.reshape(ops.transpose(made, (0, 2, 1, 3)), (32, 32, 1)))


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=300)
args = parser.parse_args()
model = GAN()
model.compile(keras.optimizers.Adam(3e-4), keras.optimizers.Adam(3e-4), keras.losses.BinaryCrossentropy(True))
hvdtrain.Trainer(model).fit(load_digits()[0], batch=60, epochs=args.epochs, callbacks=[Pictures()])
