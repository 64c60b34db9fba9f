"""TFRecord files with a description of their records (see `features`), as `data pack` writes it."""

import re
from collections.abc import Callable, Collection
from pathlib import Path

import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.files.class_folders import SPLITS
from hvdtrain.data.files.features import FILE_NAME, Description, read_description
from hvdtrain.data.files.locations import find_data
from hvdtrain.data.files.tfrecord_index import Records, record_files, records_of
from hvdtrain.data.preprocessing import ImageInputs, Preprocessing
from hvdtrain.data.source import Source, input_shape
from hvdtrain.data.sources.decoding import to_unit
from hvdtrain.data.sources.tfrecord_source import TFRecordSource, held
from hvdtrain.data.splits import DataSplits
from hvdtrain.data.subset import hold_out


def load(
    *, path: str = "", features: str = "", validation: int = 0, validation_path: str = "", image_size: int = 0
) -> DataSplits:
    """Load the samples of TFRecord files; compressed ones (GZIP or ZLIB) are unpacked into the cache.

    Args:
        path: a TFRecord file, a folder of them or a pattern such as "data/train-*". Files belong to the split in their
            names: train, validation (or val), test.
        features: the description of the records (see `features`); default: features.yaml beside the files.
        validation: records to hold out if there are no validation files; 0: one in ten.
        validation_path: validation files, like `path`; of a folder with several splits, the validation split.
        image_size: height and width to resize all images to; 0 if they have one size.

    Raises:
        ConfigError: options that exclude one another.
        DataError: `path` does not exist, or cannot be used.
    """
    if image_size < 0 or validation < 0:
        raise ConfigError(
            f"tfrecord takes image_size and validation of 0 or more. Received: {image_size} and {validation}."
        )
    parts = _parts(path)
    if validation_path:
        given = _parts(validation_path)
        parts = {"train": parts["train"], "validation": given[_held(given) or "train"]}
    description = _description(features, parts["train"])

    def source(part: str, name: str) -> TFRecordSource:
        return TFRecordSource(parts[part], description, f"{path} ({name})" if name else path, image_size=image_size)

    train, held = _split(source, parts, validation)
    finish = to_unit if any(spec.dtype == tf.uint8 for spec in tf.nest.flatten(train.spec[0])) else None
    inputs = train.spec[0]
    pixels = isinstance(inputs, tf.TensorSpec) and inputs.dtype == tf.uint8 and inputs.shape.rank == 3
    return DataSplits(
        train,
        held,
        input_shape(train),
        description.classes,
        finish=finish,
        preprocessing=Preprocessing(description.class_names, image=ImageInputs(*inputs.shape) if pixels else None),
        held_out=_held(parts) is None,
    )


def _split(
    source: Callable[[str, str], TFRecordSource], parts: dict[str, Records], validation: int
) -> tuple[Source, Source]:
    """Return training and validation samples: by their files, or with `validation` held out."""
    held = _held(parts)
    if held is None:
        whole = source("train", "")
        return hold_out(whole, validation)
    if validation:
        raise ConfigError(f"There are files for {held}: leave out --data-args validation.")
    return source("train", "training"), source(held, held)


def _held(parts: Collection[str]) -> str | None:
    """Return the validation split; None if there is none."""
    return next((part for part in ("validation", "test") if part in parts), None)


def _parts(path: str) -> dict[str, Records]:
    """Return the records by split; `train` is never empty."""
    parts: dict[str, list[Path]] = {}
    files = record_files(path)
    for file in files:
        parts.setdefault(_split_of(file), []).append(file)
    return {name: records_of(mine) for name, mine in (parts if "train" in parts else {"train": files}).items()}


def _split_of(file: Path) -> str:
    """Return the split that a word in the name of a file or its folder stands for; `train` by default."""
    words = [*re.split("[^a-z]+", file.name.lower()), file.parent.name.lower()]
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def _description(features: str, records: Records) -> Description:
    """Read the description `features`, or the one beside the records."""
    if features:
        return read_description(find_data(features))
    beside = records.folder / FILE_NAME
    if beside.is_file():
        return read_description(beside)
    raise DataError(
        f"There is no {beside}, which says what the records hold: write one, or name it with --data-args features "
        f"FILE (see hvdtrain/data/files/features.py). The first record {held(records.read(0))}."
    )
