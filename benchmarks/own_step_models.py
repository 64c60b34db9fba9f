"""Models with steps of their own, as users write them, for `whole_batch.py`."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

ops, layers = keras.ops, keras.layers


class OwnStep(keras.Model):
    """A model whose loss of a batch is its own.

    Args:
        width: of its layers.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def cost(self, x: Any) -> Any:
        raise NotImplementedError

    def call(self, x: Any) -> Any:
        return self.cost(x)

    def noise(self, like: Any) -> Any:
        return keras.random.normal(ops.shape(like), seed=self.seeds)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.cost(data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def convolutions(width: int, outputs: int) -> keras.Sequential:
    return keras.Sequential(
        [
            layers.Conv2D(width, 3, 2, "same", activation="relu"),
            layers.Conv2D(2 * width, 3, 2, "same", activation="relu"),
            layers.Flatten(),
            layers.Dense(outputs),
        ]
    )


def upwards(width: int) -> keras.Sequential:
    return keras.Sequential(
        [
            layers.Dense(7 * 7 * width, activation="relu"),
            layers.Reshape((7, 7, width)),
            layers.Conv2DTranspose(width, 3, 2, "same", activation="relu"),
            layers.Conv2DTranspose(1, 3, 2, "same", activation="sigmoid"),
        ]
    )


class Gan(OwnStep):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.critic, self.maker = convolutions(width, 1), upwards(width)
        self.critics = keras.optimizers.Adam(1e-4)

    def call(self, x: Any) -> Any:
        return self.critic(self.maker(ops.zeros((1, 32))))

    def train_step(self, data: Any) -> dict[str, Any]:
        count = ops.shape(data)[0]
        hidden = keras.random.normal((count, 32), seed=self.seeds)
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], 0)
        losses = []
        for model, optimizer, is_maker in ((self.critic, self.critics, False), (self.maker, self.optimizer, True)):
            with tf.GradientTape() as tape:
                made = self.maker(hidden)
                scores = self.critic(made if is_maker else ops.concatenate([data, made], 0))
                wanted = labels[:count] if is_maker else labels
                loss = ops.mean(keras.losses.binary_crossentropy(wanted, scores, from_logits=True))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            losses.append(loss)
        return {"critic": losses[0], "maker": losses[1]}


class Vae(OwnStep):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.encoder, self.decoder = convolutions(width, 32), upwards(width)

    def cost(self, x: Any) -> Any:
        mean, variance = ops.split(self.encoder(x), 2, axis=1)
        made = self.decoder(mean + ops.exp(0.5 * variance) * self.noise(mean))
        spread = ops.sum(1 + variance - mean**2 - ops.exp(variance), axis=1)
        return ops.mean(ops.sum((made - x) ** 2, axis=(1, 2, 3)) - 0.5 * spread)


class Diffusion(OwnStep):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.net = keras.Sequential(
            [layers.Conv2D(width, 3, padding="same", activation="relu") for _ in range(3)] + [layers.Conv2D(1, 1)]
        )

    def cost(self, x: Any) -> Any:
        noise = self.noise(x)
        time = keras.random.uniform((ops.shape(x)[0], 1, 1, 1), seed=self.seeds)
        mixed = ops.cos(time) * x + ops.sin(time) * noise
        guess = self.net(ops.concatenate([mixed, time + ops.zeros_like(x)], -1))
        return ops.mean((guess - noise) ** 2)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.cost(data)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": norm}


class SimClr(OwnStep):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.encoder = convolutions(width, 64)

    def cost(self, x: Any) -> Any:
        one, other = (ops.normalize(self.encoder(x + 0.1 * self.noise(x)), axis=1) for _ in range(2))
        scores = ops.matmul(one, ops.transpose(other)) / 0.1
        numbers = ops.arange(ops.shape(x)[0])
        return ops.mean(keras.losses.sparse_categorical_crossentropy(numbers, scores, from_logits=True))


class Language(OwnStep):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.words, self.places = layers.Embedding(1000, 8 * width), layers.Embedding(64, 8 * width)
        self.attention, self.norm = layers.MultiHeadAttention(4, 2 * width), layers.LayerNormalization()
        self.inner, self.outer = layers.Dense(32 * width, activation="gelu"), layers.Dense(8 * width)
        self.head = layers.Dense(1000)

    def cost(self, x: Any) -> Any:
        hidden = self.words(x[:, :-1]) + self.places(ops.arange(x.shape[1] - 1))
        hidden = hidden + self.attention(self.norm(hidden), hidden, use_causal_mask=True)
        scores = self.head(hidden + self.outer(self.inner(hidden)))
        return ops.mean(keras.losses.sparse_categorical_crossentropy(x[:, 1:], scores, from_logits=True))


MODELS: Mapping[str, Callable[[int], OwnStep]] = {
    "gan": Gan,
    "vae": Vae,
    "diffusion": Diffusion,
    "simclr": SimClr,
    "language": Language,
}


def built(name: str, width: int) -> keras.Model:
    """Return a model, built and compiled."""
    keras.utils.set_random_seed(0)
    model = MODELS[name](width)
    model(tf.constant(samples(name, 2)))
    model.compile(keras.optimizers.Adam(1e-4))
    return model


def samples(name: str, count: int) -> np.ndarray:
    """Return images, or sentences of a language model."""
    rng = np.random.default_rng(0)
    if name == "language":
        return rng.integers(0, 1000, (count, 65)).astype("int32")
    return rng.random((count, 28, 28, 1), "float32")
