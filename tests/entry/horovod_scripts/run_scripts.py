"""Run users' Horovod scripts one after the other on every rank of one launch.

Usage: (launcher) python run_scripts.py COMMANDS_JSON

The commands are a list of [name, script, argument…]. Each script runs in a namespace of its own, as `__main__`, in a
folder named after its file, from other random numbers on each rank. TensorFlow starts once for all. Each rank prints
one line of JSON per command: the hashes of the trainable weights of all models that the script leaves, and its losses.
Moving statistics and metrics are each rank's own.
"""

import hashlib
import json
import os
import runpy
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf


def main(commands):
    rank = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    tf.get_logger().setLevel("ERROR")
    serve_mnist()
    for name, script, *arguments in commands:
        folder = Path(script).with_suffix("")
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
        tf.keras.utils.set_random_seed(11 + rank)
        sys.argv = [script, *arguments]
        begin = time.perf_counter()
        names = runpy.run_path(script, run_name="__main__")
        report(name, names, time.perf_counter() - begin)
        tf.keras.mixed_precision.set_global_policy("float32")
        tf.keras.backend.clear_session()


def serve_mnist():
    """Make `load_data` return a small set whose digits can be told apart, without a download."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 60, (10, 28, 28)) + 14 * np.arange(10)[:, None, None]
    labels = rng.integers(0, 10, 256)
    images = (patterns[labels] + rng.integers(0, 55, (256, 28, 28))).astype("uint8")
    data = (images, labels), (images[:64], labels[:64])
    tf.keras.datasets.mnist.load_data = lambda path="mnist.npz": data
    if not tf.keras.Model.__module__.startswith("tf_keras"):
        import keras

        keras.datasets.mnist.load_data = tf.keras.datasets.mnist.load_data


def report(name, names, seconds):
    models = {key: value for key, value in names.items() if isinstance(value, tf.keras.Model)}
    losses = names["history"].history["loss"] if "history" in names else names["losses"]
    line = {
        "name": name,
        "models": {key: hash_of(model.trainable_weights) for key, model in models.items()},
        "losses": [float(loss) for loss in losses],
        "seconds": round(seconds, 2),
    }
    sys.stdout.write(f"\nSCRIPT {json.dumps(line)}\n")
    sys.stdout.flush()


def hash_of(weights):
    """Return the hash of some weights; None if there are none, as in a model that was never built."""
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest() if weights else None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
