"""MNIST by `fit`: a Keras model whose batches are divided among the ranks.

    horovodrun -np 2 python examples/mnist.py

Shows the accuracy on the test images after each epoch, 0.99 after five. One rank trains the same but for dropout.
MNIST is downloaded to ~/.keras/datasets/mnist.npz; on a machine without internet, put that file there, or pass --data.
"""

import argparse
import sys

import hvdtrain

hvdtrain.init()  # before TensorFlow does any work

import keras
import numpy as np
from keras import layers


def load(path):
    """Return MNIST's images [n, 28, 28, 1], from 0 to 1, and labels, of a file or of Keras' cache."""
    if path:
        file = np.load(path)
        arrays = [file[name] for name in ("x_train", "y_train", "x_test", "y_test")]
    else:
        if hvdtrain.local_rank() == 0:
            try:
                keras.datasets.mnist.load_data()  # one rank of each host downloads it
            except Exception as error:
                sys.exit(f"{error}\nWithout internet, put mnist.npz into ~/.keras/datasets, or pass --data mnist.npz.")
        hvdtrain.barrier()
        (x, y), (test_x, test_y) = keras.datasets.mnist.load_data()
        arrays = [x, y, test_x, test_y]
    x, y, test_x, test_y = arrays
    return (x[..., None] / 255.0, y), (test_x[..., None] / 255.0, test_y)


def build():
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )


parser = argparse.ArgumentParser()
parser.add_argument("--data", help="mnist.npz; default: keras.datasets.mnist, which downloads it")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=128, help="samples of a step, over all ranks")
args = parser.parse_args()

(x, y), test = load(args.data)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
trainer = hvdtrain.Trainer(build(), keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
trainer.fit(x, y, batch=args.batch, epochs=args.epochs, validation_data=test)
