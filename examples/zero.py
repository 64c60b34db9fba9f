"""ZeRO: parameters, gradients and Adam's moments are divided among the ranks, and no rank ever holds the whole model.

    horovodrun -np 2 python examples/zero.py

Shows the loss, which is that of one rank without ZeRO, and each rank's peak memory; compare `--stage 0`. A checkpoint
goes on on any number of ranks and in any stage.
"""

import argparse
import resource

import hvdtrain

hvdtrain.init()

import keras
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--stage", type=int, default=3, help="1: optimizer's state; 2: gradients, too; 3: parameters, too")
args = parser.parse_args()


def build():
    hidden = [keras.layers.Dense(args.width, activation="gelu") for _ in range(6)]
    return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(1)])


x = np.random.default_rng(0).standard_normal((512, 64)).astype("float32")  # the same on every rank
y = np.sin(x.sum(axis=1, keepdims=True))
# Given as a function, the model is built as slices from the start.
trainer = hvdtrain.Trainer(build, keras.optimizers.Adam(1e-3), "mse", zero=args.stage)
trainer.fit(x, y, batch=64, epochs=args.epochs)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(f"rank {hvdtrain.rank()}: peak memory {peak} MiB", flush=True)
