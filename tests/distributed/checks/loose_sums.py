"""Losses that are sums over samples, under rules whose ranks take steps of their own.

Losses here are linear in the weights: their gradients are the same for any weights, and so is what all updates of an
epoch come to, in any order and as stale as they may be.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from world import World, computing_in, refused
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import ConfigError

SAMPLES, BATCH, EPOCHS = 48, 8, 2
RULES: dict[str, dict[str, Any]] = {
    "async": {"update": "async"},
    "async, bounded": {"update": "async", "max_staleness": 1},
    "async, ahead": {"update": "async", "pull_ahead": True},
    "async, in step": {"update": "async", "max_staleness": 0},
    "gossip": {"update": "gossip"},
    "local": {"local_steps": 2},
    "local, accumulated": {"local_steps": 3, "accumulate": 2},
    "local, later": {"local_steps": 2, "local_after": 3},
}


class Product(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.sum(y_true * y_pred, axis=-1)


class Adding(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(0.5 * keras.ops.sum(inputs))
        return inputs


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(targets * self(inputs, training=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def model(kind: str) -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(2)(inputs)
    made = (OwnStep if kind == "own step" else keras.Model)(inputs, Adding()(outputs) if kind == "added" else outputs)
    made.compile(keras.optimizers.SGD(0.01), Product(reduction="sum" if kind == "sum" else "sum_over_batch_size"))
    return made


def check_a_sum_counts_in_full(world: World) -> None:
    assert_trained(world, ["sum"], ["async", "local"])


@worlds("mpirun-2", "mpirun-4", extended=True)
def check_sums_count_in_full(world: World) -> None:
    assert_trained(world, ["mean", "sum"], list(RULES))
    for options in RULES.values():
        with refused("The step of OwnStep is its own", ConfigError):
            trained("own step", world, options)
        assert "each rank computes layer Adding" in trained("added", world, options).factory.warnings[0]


def samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((SAMPLES, 3)), rng.standard_normal((SAMPLES, 2))


def trained(kind: str, world: World, options: dict[str, Any]) -> hvdtrain.Trainer:
    trainer = hvdtrain.Trainer(model(kind), backend=world.backend, **options)
    trainer.fit(*samples(), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    trainer.consolidate()
    return trainer


def assert_trained(world: World, kinds: Sequence[str], rules: Sequence[str]) -> None:
    with computing_in("float64"):
        for kind in kinds:
            theirs = model(kind)
            theirs.fit(*samples(), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
            for rule in rules:
                ours = trained(kind, world, RULES[rule]).model.get_weights()
                for mine, expected in zip(ours, theirs.get_weights(), strict=True):
                    np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-12, err_msg=f"{kind}, {rule}")
