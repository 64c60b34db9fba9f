"""The same training by Horovod and by the strategies of `tf.distribute`, to compare them on your machine.

    horovodrun -np 2 python examples/strategies.py
    mpirun -np 2 python examples/strategies.py --backend multi_worker_mirrored
    python examples/strategies.py --backend mirrored --replicas 2
    python examples/strategies.py --backend central_storage --replicas 2

Each prints the loss after training, which is the same but for rounding, and the steps per second.
"""

import argparse
import time

import hvdtrain

parser = argparse.ArgumentParser()
backends = ["auto", "single", "mirrored", "multi_worker_mirrored", "central_storage"]
parser.add_argument("--backend", default="auto", choices=backends)
parser.add_argument("--replicas", type=int, help="of mirrored and central_storage")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

hvdtrain.init(backend=args.backend, replicas=args.replicas)

import keras

from hvdtrain.data.digits import load_digits


def build():
    """Return the model; a strategy creates variables itself, and so is given functions."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


images, labels = load_digits()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
trainer = hvdtrain.Trainer(build, lambda: keras.optimizers.SGD(0.1, momentum=0.9), loss)
trainer.fit(images, labels, batch=64, epochs=1, shuffle=False, verbose=0)  # traces and compiles
begin = time.perf_counter()
result = trainer.fit(images, labels, batch=64, epochs=args.epochs, initial_epoch=1, shuffle=False, verbose=0)
seconds = time.perf_counter() - begin
if hvdtrain.rank() == 0:
    steps = len(range(0, len(images), 64)) * (args.epochs - 1)
    print(f"loss {result.history['loss'][-1]:.6f}  {steps / seconds:.0f} steps/s")
