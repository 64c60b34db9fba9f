"""Packing class folders of images into TFRecord shards, which `--data tfrecord` reads sequentially or at random."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf
import yaml

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.arrays import held_out_numbers
from hvdtrain.data.sources.class_folders import Found, scan
from hvdtrain.data.sources.tfrecord import FILE_NAME

IMAGE, LABEL, NAME = "image/encoded", "image/class/label", "image/filename"
"""Feature names of a record: those of ImageNet's TFRecords."""
ORDER_SEED = 20260102
"""Records are shuffled once, so that each shard holds all classes."""
SHARD_BYTES = 128 * 10**6
"""Large enough for sequential reads, small enough for many shards; 100 to 200 MB is the common advice."""


@dataclass(frozen=True)
class Shard:
    """A file to write, and the numbers of its images."""

    file: str
    images: np.ndarray


def pack(source: Path, dest: Path, *, shards: int = 0, validation: int = 0) -> Iterator[tuple[int, int]]:
    """Pack class folders of images into TFRecord shards, without re-encoding.

    `dest` appears once it is complete: an interrupted pack leaves nothing but a hidden folder beside it.

    Args:
        source: a folder of class folders, or a tar file of one; see `class_folders.scan`.
        dest: a folder that does not exist, or is empty.
        shards: number of training shards, in proportion for other splits; 0: one for every 128 MB.
        validation: images to hold out for validation, stratified by class, if there is no folder of them.

    Yields:
        Numbers of images written and of all, after each shard.

    Raises:
        ConfigError: numbers out of range.
        DataError: no images, an unreadable one, or a `dest` that cannot be written.
    """
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise DataError(f"{dest} exists already, and nothing in it is overwritten: name a new or empty folder.")
    found = scan(source)
    planned = _shards(found, _splits(found, validation), shards)
    description = {
        "features": {IMAGE: {"kind": "image"}, LABEL: {"kind": "int64", "dtype": "int32"}},
        "inputs": IMAGE,
        "targets": LABEL,
        "classes": len(found.classes),
        "class_names": found.classes,
        "name": NAME,
    }
    with _created(dest) as draft, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        done = 0
        for written in pool.map(lambda shard: _write(draft / shard.file, found, shard.images), planned):
            done += written
            yield done, len(found.names)
        (draft / FILE_NAME).write_text(yaml.safe_dump(description, sort_keys=False), encoding="utf-8")


def _splits(found: Found, validation: int) -> dict[str, np.ndarray]:
    """Return the image numbers of each split, in the order in which they are stored."""
    splits = {name: np.flatnonzero(found.splits == name) for name in ("train", "validation", "test")}
    splits = {name: numbers for name, numbers in splits.items() if len(numbers)}
    if validation and len(splits) > 1:
        raise ConfigError(f"{found.path} has images for {list(splits)[1]} already: leave out --validation.")
    if not 0 <= validation < len(found.names):
        raise ConfigError(f"--validation must be from 0 to {len(found.names) - 1} images. Received: {validation}.")
    if validation:  # the images that training on the folder itself would hold out
        parts = held_out_numbers(len(found.names), validation, found.labels, str(found.path))
        splits = dict(zip(("train", "validation"), parts, strict=True))
    rng = np.random.default_rng(ORDER_SEED)
    return {name: rng.permutation(numbers) for name, numbers in splits.items()}


def _shards(found: Found, splits: dict[str, np.ndarray], count: int) -> list[Shard]:
    images = len(splits["train"])
    if not 0 <= count <= images:
        raise ConfigError(f"--shards must be from 0 to {images}, the training images. Received: {count}.")
    planned = []
    for split, numbers in splits.items():
        by_size = -(-int(found.blobs.lengths[numbers].sum()) // SHARD_BYTES)
        files = round(count * len(numbers) / images) if count else min(by_size, len(numbers))
        parts = np.array_split(numbers, max(1, files))
        planned += [
            Shard(f"{split}-{place:05d}-of-{len(parts):05d}.tfrecord", part) for place, part in enumerate(parts)
        ]
    return planned


def _write(file: Path, found: Found, images: np.ndarray) -> int:
    with tf.io.TFRecordWriter(str(file)) as writer:
        for number in images.tolist():
            values = {
                IMAGE: tf.train.Feature(bytes_list=tf.train.BytesList(value=[found.blobs.read(number)])),
                LABEL: tf.train.Feature(int64_list=tf.train.Int64List(value=[int(found.labels[number])])),
                NAME: tf.train.Feature(bytes_list=tf.train.BytesList(value=[os.fsencode(found.names[number])])),
            }
            features = tf.train.Features(feature=values)
            writer.write(tf.train.Example(features=features).SerializeToString(deterministic=True))
    return len(images)


@contextlib.contextmanager
def _created(dest: Path) -> Iterator[Path]:
    """Yield a folder that becomes `dest` if the block succeeds."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.absolute().parent) as folder:
            draft = Path(folder) / dest.name
            draft.mkdir()
            yield draft
            os.replace(draft, dest)
    except (OSError, tf.errors.OpError) as error:
        raise DataError(f"{dest} cannot be written: {getattr(error, 'strerror', None) or error}.") from None
