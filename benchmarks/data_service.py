"""Compares training that decodes in its own processes with training that leaves it to tf.data service.

Usage: mpirun -np 2 python benchmarks/data_service.py [--service local] [--rounds 5] [--steps 20]

JPEG files are written into a temporary folder; decoding and resizing them takes longer than the step of the small
model, so that training waits for its data. Both sides train the same samples in turn, in one job.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import hvdtrain

SIZE, SMALL, FILES, BATCH = 512, 64, 64, 32


def parsed() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", default="local", help="local, or grpc://HOST:PORT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def write_images(folder: Path) -> list[str]:
    """Write photos of noise that compresses as photos do."""
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    for number in range(FILES):
        coarse = tf.image.resize(rng.random((32, 32, 3)) * 255, [SIZE, SIZE], method="bicubic")
        pixels = tf.cast(tf.clip_by_value(coarse, 0, 255), tf.uint8)
        (folder / f"{number:03}.jpg").write_bytes(tf.io.encode_jpeg(pixels, quality=92).numpy())
    return sorted(str(path) for path in folder.glob("*.jpg"))


def dataset_of(paths: list[str]) -> Any:
    """Return an endless Dataset of batches that are decoded and resized."""
    import tensorflow as tf

    def decode(path: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        pixels = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        return tf.image.resize(tf.cast(pixels, tf.float32) / 255, [SMALL, SMALL], antialias=True), label

    labels = [number % 10 for number in range(len(paths))]
    return tf.data.Dataset.from_tensor_slices((paths, labels)).repeat().map(decode).batch(BATCH)


def trainer() -> hvdtrain.Trainer:
    """Return the trainer of a small convolutional network."""
    import keras

    layers = [
        keras.Input((SMALL, SMALL, 3)),
        keras.layers.Conv2D(8, 3, strides=4, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
    return hvdtrain.Trainer(keras.Sequential(layers), keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")


def main() -> None:
    """Measure both sides and print their rates on rank 0."""
    words = parsed()
    hvdtrain.init()
    folder = hvdtrain.broadcast_object(tempfile.mkdtemp() if hvdtrain.rank() == 0 else None)
    if hvdtrain.rank() == 0:
        write_images(Path(folder))
    hvdtrain.barrier()
    dataset = dataset_of(sorted(str(path) for path in Path(folder).glob("*.jpg")))
    sides = {"in the ranks": (trainer(), None), f"--data-service {words.service}": (trainer(), words.service)}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(words.rounds + 1):
        for name, (one, service) in sides.items():
            hvdtrain.barrier()
            begin = time.perf_counter()
            one.fit(dataset, steps_per_epoch=words.steps, epochs=1, verbose=0, data_service=service)
            if round_number:  # the first one compiles
                rates[name].append(words.steps * BATCH / (time.perf_counter() - begin))
    if hvdtrain.rank() == 0:
        for name, found in rates.items():
            low, high = min(found), max(found)
            print(f"{name:28} {statistics.median(found):8.1f} samples/s  ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
