"""A user's script whose fit is elastic: the second argument says what happens to ranks, the first where to write."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import hvdtrain
from hvdtrain.observability.tracker import Tracker
from hvdtrain.runtime.session import current

hvdtrain.init()
WEIGHTS, WHAT = sys.argv[1:]
MORE = Path("more")
EPOCHS, STEPS = 8, 10

keras.config.set_floatx("float64")
keras.utils.set_random_seed(hvdtrain.rank())  # rank 0's weights are those that count
inputs = np.random.default_rng(3).normal(size=(245, 8))  # 9 batches of 25 and one of 20
targets = np.tanh(inputs @ np.linspace(-1.0, 1.0, 8))[:, None]


def lose(rank, where, ranks):
    """Kill `rank` of a world of so many, once in the job."""
    mark = Path(f"lost-{where}")
    if WHAT == "lost" and (hvdtrain.rank(), hvdtrain.size()) == (rank, ranks) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Traced(keras.layers.Layer):
    """Passes its input on, and kills a rank while the step is compiled."""

    def call(self, x):
        if tf.inside_function() and current().link.activity.phase == "compiling":
            lose(1, "compiling", ranks=2)
        return x


class Departures(keras.callbacks.Callback):
    """A user's callback that remembers something, kills ranks, and makes a mistake on rank 1."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def get_state(self):
        return {"steps": self.steps}

    def set_state(self, state):
        self.steps = state["steps"]

    def on_test_batch_end(self, batch, logs=None):
        lose(3, "in evaluation", ranks=4)

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if WHAT == "mistake" and hvdtrain.rank() == 1 and self.steps == 13:
            raise ValueError("a mistake of the user's own")
        if WHAT == "lost" and hvdtrain.size() == 1:
            MORE.touch()
            time.sleep(0.2)
        if MORE.exists() and self.steps % 5 == 3:
            lose(0, "in a callback", ranks=3)


class Notes(Tracker):
    """Writes what it is told to a file, whoever is rank 0."""

    def begin(self, training, name, parameters):
        self.training = training

    def write(self, figures, step):
        with Path("tracked").open("a") as file:
            print(self.training, step, *figures, file=file)

    def end(self, results):
        self.write(results, results["steps"])

    def interrupt(self):
        pass


def fsync(descriptor, sync=os.fsync):
    """Write a file of a checkpoint out, and kill the rank that does."""
    lose(0, "while it saves", ranks=3)
    sync(descriptor)


os.fsync = fsync
model = keras.Sequential([keras.Input([8]), Traced(), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
departures = Departures()
best = keras.callbacks.EarlyStopping("val_loss", patience=100, restore_best_weights=True)
trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(0.05, momentum=0.9), "mse")
result = trainer.fit(
    inputs,
    targets,
    batch=25,
    epochs=EPOCHS,
    validation_data=(inputs[:51], targets[:51]),
    callbacks=[departures, best, Notes(), keras.callbacks.CSVLogger(f"{WEIGHTS}.csv")],
    verbose=2,
    checkpoint="saved",
    **({} if WHAT == "alone" else {"elastic": True, "commit_every": 5}),
)
np.savez(f"{WEIGHTS}-{hvdtrain.rank()}.npz", *model.get_weights())
line = {"steps": departures.steps, "result": result.steps, "val_loss": result.history["val_loss"], "best": best.best}
print("ENDED", json.dumps(line), flush=True)
