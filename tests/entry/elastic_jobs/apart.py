"""A user's script that trains by an asynchronous rule, and of which ranks are lost.

Its argument is JSON: options of the trainer; "lost": by the launcher's number of a rank, the step after which it is
killed; "resume": a folder of checkpoints to go on from; "elastic": whether the others go on.
"""

import json
import os
import signal
import sys
import threading
import time

import keras
import numpy as np

import hvdtrain
from hvdtrain.runtime.session import current

STARTED_AS = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
given = json.loads(sys.argv[1])

hvdtrain.init()
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
inputs = np.random.default_rng(3).normal(size=(2400, 8))
targets = np.tanh(inputs @ np.linspace(-1.0, 1.0, 8))[:, None]


def slowly(batch):
    time.sleep(0 if "resume" in given else 0.004)
    return batch


class Slow(keras.layers.Layer):
    """Passes its input on, after a moment."""

    def call(self, x):
        import tensorflow as tf

        return tf.ensure_shape(tf.numpy_function(slowly, [x], x.dtype), x.shape)


def lose(step):
    """Kill this process between two meetings, after `step`."""

    def apart():
        return not given.get("elastic") or current().link.survivors.can_leave

    while True:
        while int(optimizer.iterations.numpy()) < step or not apart():
            time.sleep(0.001)
        time.sleep(0.02)  # the others may be about to stop Horovod
        if apart():
            break
    os.kill(os.getpid(), signal.SIGKILL)


layers = [keras.layers.Dense(16, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input([8]), Slow(), *layers])
optimizer = keras.optimizers.Adam(0.01)
if STARTED_AS in given["lost"]:
    threading.Thread(target=lose, args=[given["lost"][STARTED_AS]], daemon=True).start()
trainer = hvdtrain.Trainer(model, optimizer, "mse", **given.get("options", {}))
saved = hvdtrain.Checkpoint("saved", every=50, keep=100)
if "resume" in given or given.get("hosts"):
    trainer.resume(given["resume"]) if "resume" in given else None
    saved = None
result = trainer.fit(
    inputs,
    targets,
    batch=24,
    epochs=2,
    validation_data=(inputs[:48], targets[:48]),
    verbose=2,
    log_every=1000,
    checkpoint=saved,
    **({"elastic": True, "commit_every": 50} if given.get("elastic") else {}),
)
np.savez(f"weights-{hvdtrain.rank()}.npz", *model.get_weights())
line = {"rank": hvdtrain.rank(), "size": hvdtrain.size(), "steps": result.steps, "val_loss": result.history["val_loss"]}
print("ENDED", json.dumps(line), flush=True)
