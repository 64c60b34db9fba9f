"""Small models of each kind that a row may name, with their data and what they are compiled with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.layers.experts import MixtureOfExperts
from hvdtrain.models import transformer

layers, ops = keras.layers, keras.ops
SAMPLES, LENGTH, WORDS = 70, 8, 32
"""With batches of 16, four full ones and one of six samples an epoch."""
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
rng = np.random.default_rng(11)
FEATURES = rng.standard_normal((SAMPLES, 12))
CLASSES = rng.integers(0, 3, SAMPLES)
WORDS_OF = rng.integers(1, WORDS, (SAMPLES, LENGTH + 1)).astype("int32")


@dataclass(frozen=True)
class Kind:
    """How a model is built, and trained by `Model.fit`."""

    build: Callable[[], keras.Model]
    x: np.ndarray
    y: np.ndarray
    loss: Any = CROSS_ENTROPY
    layouts: Callable[[], Any] = dict
    """Layouts of its weights along tp."""
    digits: float = 1e-9
    """By which it may differ from one process."""


def perceptron() -> keras.Model:
    hidden = [layers.Dense(24, activation="tanh"), layers.Dense(16, activation="relu", kernel_regularizer="l2")]
    return keras.Sequential([keras.Input((12,)), *hidden, layers.Dense(3)])


def normalized() -> keras.Model:
    x = inputs = keras.Input((12,))
    for width in (16, 8):
        x = layers.BatchNormalization(momentum=0.9)(layers.Dense(width, activation="tanh")(x))
    return keras.Model(inputs, layers.Dense(3)(x))


def lookup() -> keras.Model:
    """Two tables, of which one has more rows than a batch touches."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    found = [layers.Flatten()(layers.Embedding(rows, 3)(tokens)) for rows in (WORDS, 301)]
    return keras.Model(tokens, layers.Dense(3)(layers.concatenate(found)))


def language() -> keras.Model:
    return transformer.build((LENGTH,), WORDS, 1, depth=2, width=16, heads=4)


def experts() -> keras.Model:
    """Experts beside layers that may be split."""
    x = inputs = keras.Input((3, 4))
    x = x + layers.Dense(4, name="down")(layers.Dense(6, activation="relu", name="up")(x))
    x = x + MixtureOfExperts(4, 8, seed=5, name="experts", top_k=2, capacity_factor=None)(
        layers.LayerNormalization()(x)
    )
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


class Sampling(keras.Model):
    """A step of its own: a mean and a sum over the batch, with noise drawn for it, clipped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers.Dense(6, activation="tanh"), layers.Dense(12)
        self.spread = layers.Dense(6)
        self.seeds = keras.random.SeedGenerator(5)
        self.build((None, 12))

    def build(self, shape: Any) -> None:
        self.encoder.build(shape)
        self.spread.build(shape)
        self.decoder.build((None, 6))
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.decoder(self.encoder(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        with tf.GradientTape() as tape:
            mean, variance = self.encoder(x), self.spread(x)
            noise = keras.random.normal(ops.shape(mean), seed=self.seeds, dtype=mean.dtype)
            errors = ops.sum((self.decoder(mean + ops.exp(0.5 * variance) * noise) - x) ** 2, -1)
            loss = ops.mean(errors) - 0.005 * ops.sum(1 + variance - mean**2 - ops.exp(variance))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply([tf.clip_by_norm(each, 3.0) for each in gradients], self.trainable_variables)
        return {"loss": loss, "spread": ops.mean(variance)}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        return {"loss": ops.mean(ops.sum((self(x) - x) ** 2, -1)), "largest": ops.max(x)}


class Adversaries(keras.Model):
    """Two optimizers, of which one trains against the other (a GAN)."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = (
            layers.Dense(12),
            keras.Sequential([layers.Dense(5, activation="tanh"), layers.Dense(1)]),
        )
        self.critics = keras.optimizers.Adam(0.02)
        self.seeds = keras.random.SeedGenerator(5)
        self.maker.build((None, 12))
        self.critic.build((None, 12))
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.critic(self.maker(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        noise = keras.random.normal(ops.shape(x), seed=self.seeds, dtype=x.dtype)
        with tf.GradientTape() as tape:
            scores = self.critic(ops.concatenate([self.maker(noise), x], 0))
            labels = ops.concatenate([ops.ones((ops.shape(x)[0], 1)), ops.zeros((ops.shape(x)[0], 1))], 0)
            cost = ops.mean(keras.losses.binary_crossentropy(labels, scores, from_logits=True))
        variables = self.critic.trainable_variables
        self.critics.apply(tape.gradient(cost, variables), variables)
        with tf.GradientTape() as tape:
            loss = -ops.mean(self(noise))
        variables = self.maker.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss, "cost": cost}

    def test_step(self, data: Any) -> dict[str, Any]:
        return {"loss": -ops.mean(self(data[0])), "largest": ops.max(data[0])}


class Centered(layers.Layer):
    """A layer of its own with a statistic of the batch, and a state that follows it."""

    def build(self, shape: Any) -> None:
        self.center = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="center")

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x - self.center
        mean = ops.mean(x, 0)
        self.center.assign(0.9 * self.center + 0.1 * mean)
        return x - mean


def largest_error(y_true: Any, y_pred: Any) -> Any:
    """A loss that is one number for the batch."""
    errors = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    return ops.sqrt(ops.mean(errors**2)) + 0.1 * ops.max(errors)


def centered() -> keras.Model:
    return keras.Sequential([keras.Input((12,)), layers.Dense(8, activation="tanh"), Centered(), layers.Dense(3)])


KINDS: dict[str, Kind] = {
    "perceptron": Kind(perceptron, FEATURES, CLASSES),
    "normalized": Kind(normalized, FEATURES, CLASSES),
    "lookup": Kind(lookup, WORDS_OF[:, :-1], CLASSES),
    "language": Kind(
        language, WORDS_OF[:, :-1], WORDS_OF[:, 1:], layouts=lambda: transformer.rules(WORDS, 2), digits=2e-6
    ),  # its logits have 32 bits
    "experts": Kind(
        experts,
        rng.standard_normal((SAMPLES, 3, 4)),
        CLASSES,
        layouts=lambda: {"up/kernel": (None, "tp"), "down/kernel": ("tp", None)},
    ),
    "sampling": Kind(Sampling, FEATURES, CLASSES, loss=None),
    "adversaries": Kind(Adversaries, FEATURES, CLASSES, loss=None),
    "centered": Kind(centered, FEATURES, CLASSES, loss=largest_error),
}
