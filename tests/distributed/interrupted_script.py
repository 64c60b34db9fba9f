"""A user's script that saves checkpoints and goes on from them, with nothing in it about being killed but a callback.

Usage: (launcher) python interrupted_script.py FOLDER [RANK STEP]: that rank is killed at that step.
"""

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import hvdtrain
from hvdtrain.checkpoint.naming import complete

hvdtrain.init()
folder, *kill = sys.argv[1:]

rng = np.random.default_rng(0)
x = rng.standard_normal((50, 6))
y = np.argmax(x[:, :4] + 0.1 * rng.standard_normal((50, 4)), axis=1)


def make_trainer():
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(4, activation="softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return hvdtrain.Trainer(model)


class Kill(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if kill and [hvdtrain.rank(), self.steps] == [int(word) for word in kill]:
            while "step-00000006" not in (path.name for path in complete(Path(folder))):
                time.sleep(0.05)  # it is written meanwhile
            os.kill(os.getpid(), signal.SIGKILL)


trainer = make_trainer()
found = trainer.resume(folder)
history = trainer.fit(
    x,
    y,
    batch=16,
    epochs=4,
    validation_data=(x, y),
    checkpoint=hvdtrain.Checkpoint(folder, every=3, keep=2, best="val_accuracy"),
    callbacks=[Kill(), keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=0.1)],
)

plain = make_trainer()
expected = plain.fit(
    x,
    y,
    batch=16,
    epochs=4,
    validation_data=(x, y),
    verbose=0,
    callbacks=[keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=0.1)],
)
pairs = list(zip(trainer.model.get_weights(), plain.model.get_weights(), strict=True))
error = max(abs(one - other).max() for one, other in pairs) / max(abs(other).max() for _, other in pairs)
trainer.restore(folder, "best")
best = trainer.evaluate(x, y, verbose=0)
if hvdtrain.rank() == 0:
    print("resumed from", found and found.name, flush=True)
    print("error", float(error), flush=True)
    print("losses", np.allclose(history.history["loss"], expected.history["loss"], rtol=1e-9, atol=0), flush=True)
    print("best", float(best.metrics["accuracy"]) == max(expected.history["val_accuracy"]), flush=True)
