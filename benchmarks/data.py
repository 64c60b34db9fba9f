"""Samples per second of the data pipeline alone, against tf.data pipelines as one would tune them by hand.

    HVDTRAIN_DATA=… python benchmarks/data.py --samples 10000 --rounds 5 --out results.json

CIFAR-10's JPEG files, shuffled, decoded, cropped, mirrored and batched, in one process. The sides take turns, a pass
over the samples each:

    by hand, files      tf.data: list_files, shuffle, map(read, decode, augment) with AUTOTUNE, batch, prefetch
    by hand, records    tf.data: TFRecordDataset over the packed shards with interleave, a shuffle buffer, the same map
    class folders       hvdtrain, `--data class_folders` on a folder
    tar                 the same on the tar.gz file
    packed              hvdtrain, `--data tfrecord` on what `python -m hvdtrain data pack` made
    cache memory, file  hvdtrain, class folders with `--cache`

Nothing else may run on the machine meanwhile.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.bench.script import Script, print_times
from hvdtrain.bench.timing import in_turn

BATCH = 128
ARCHIVE = "cifar10-train.tar.gz"


def prepare(folder: Path, samples: int) -> tuple[Path, Path, Path]:
    """Return a folder, a tar file and a packed folder of the first images of every class."""
    source = Path(os.environ["HVDTRAIN_DATA"]) / ARCHIVE
    images = folder / "images"
    with tarfile.open(source) as archive:
        for member in archive:
            name = Path(member.name)
            if member.isfile() and int(name.stem) < samples // 10:
                target = images / name.parent.name / name.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.extractfile(member).read())
    with tarfile.open(folder / "images.tar.gz", "w:gz") as archive:
        archive.add(images, "images")
    words = [sys.executable, "-m", "hvdtrain", "data", "pack", str(images), str(folder / "packed")]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=600)
    return images, folder / "images.tar.gz", folder / "packed"


def augmented(encoded: Any, label: Any) -> Any:
    """Decode and augment one image as the pipeline does a batch."""
    import tensorflow as tf

    image = tf.io.decode_jpeg(encoded, 3)
    image = tf.image.random_crop(tf.pad(tf.ensure_shape(image, [32, 32, 3]), [[4, 4], [4, 4], [0, 0]]), [32, 32, 3])
    return tf.cast(tf.image.random_flip_left_right(image), tf.float32) * (1.0 / 255.0), label


def by_hand_files(images: Path) -> Any:
    import tensorflow as tf

    files = sorted(map(str, images.glob("*/*.jpg")))
    names = sorted({Path(file).parent.name for file in files})
    labels = [names.index(Path(file).parent.name) for file in files]
    data = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(len(files))
    data = data.map(lambda file, label: augmented(tf.io.read_file(file), label), num_parallel_calls=tf.data.AUTOTUNE)
    return data.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def by_hand_records(packed: Path) -> Any:
    import tensorflow as tf

    keys = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }

    def parse(record: Any) -> Any:
        found = tf.io.parse_single_example(record, keys)
        return augmented(found["image/encoded"], found["image/class/label"])

    shards = sorted(map(str, packed.glob("train*.tfrecord")))
    data = tf.data.Dataset.from_tensor_slices(shards).shuffle(len(shards))
    data = data.interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    data = data.shuffle(10_000).map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    return data.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def ours(kind: str, path: Path, cache: str) -> Any:
    """Return hvdtrain's stream of batches, endless."""
    from hvdtrain.config.data import DataConfig
    from hvdtrain.data.augment import augmentation
    from hvdtrain.data.cached import cached
    from hvdtrain.data.pipeline import ReadOptions, SourceTraining
    from hvdtrain.data.registry import load_splits

    splits = load_splits(DataConfig(kind, {"path": str(path)}))
    train = cached(splits.train, cache)
    augment = augmentation(("crop", "flip"), spec=train.spec, classes=splits.classes)
    read_options = ReadOptions(augment=augment, finish=splits.finish)
    data = SourceTraining(train, batch=BATCH, index=0, size=1, seed=0, tail="drop", read_options=read_options)
    return data.batches(0)


def main() -> int:
    script = Script(__doc__, rounds=5)
    script.add_argument("--samples", type=int, default=10_000)
    options = script.parsed()
    steps = options.samples * 9 // 10 // BATCH
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HVDTRAIN_CACHE"] = str(folder / "cache")
        images, tar, packed = prepare(folder, options.samples)
        sides = {
            "class folders": ours("class_folders", images, "none"),
            "tar": ours("class_folders", tar, "none"),
            "packed": ours("tfrecord", packed, "none"),
            "cache memory": ours("class_folders", images, "memory"),
            "cache file": ours("class_folders", images, "file"),
            "by hand, files": iter(by_hand_files(images).repeat()),
            "by hand, records": iter(by_hand_records(packed).repeat()),
        }

        def milliseconds(stream: Any) -> float:
            begin = time.perf_counter()
            for _ in range(steps):
                next(stream)
            return 1000.0 * (time.perf_counter() - begin) / steps

        calls = {side: partial(milliseconds, stream) for side, stream in sides.items()}
        # The first round fills buffers and lets AUTOTUNE settle.
        times = in_turn(calls, options.rounds, lambda value: [value])
    rates = {side: f"{1000.0 * BATCH / np.median(values):9.0f} samples/s" for side, values in times.items()}
    for base in ("by hand, files", "by hand, records"):
        print_times(f"a batch of {BATCH}", times, base, rates)
    script.record("a batch", {"batch": BATCH}, {"ms": times})
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
