"""A user's script, under a launcher that replaces ranks, that tries what elastic training does not go with."""

import sys

import keras
import numpy as np

import hvdtrain
from hvdtrain.config.errors import ConfigError

hvdtrain.init()
x, y = np.ones([24, 4], "float32"), np.ones([24, 1], "float32")


def pairs():
    while True:
        yield x[:8], y[:8]


def fit(*data, options=None, **arguments):
    """Train, and say what was refused."""
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    trainer = hvdtrain.Trainer(model, "sgd", "mse", **(options or {}))
    try:
        trainer.fit(*(data or (x, y)), verbose=0, **{"batch": 8, "elastic": True, **arguments})
        print("TRAINED")
    except ConfigError as error:
        print("REFUSED", error)
    sys.stdout.flush()


fit(options={"zero": 1})
fit(options={"local_steps": 2})
fit(shard="rank")
fit(pairs(), batch=None, steps_per_epoch=3)
fit(commit_every=0)
fit()
fit()
fit(elastic=False)
