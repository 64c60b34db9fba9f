"""TFRecord files as samples. A YAML file describes the features of the records, and which are inputs and targets.

    features:
      image/encoded: {kind: image, shape: [32, 32, 3]}
      image/class/label: {kind: int64, dtype: int32}
      weight: {kind: float32}
    inputs: image/encoded
    targets: image/class/label
    sample_weight: weight
    classes: 10
    class_names: [airplane, automobile, …]
    name: image/filename

`features` maps the features of a record (a tf.train.Example) to their kinds:

    image     an encoded JPEG, PNG, GIF or BMP file, decoded to bytes of pixels, shape [height, width, channels]; height
              and width may be null: they then come from the first image, or from --data-args image_size
    bytes     the raw, little-endian bytes of a tensor of `dtype` (default uint8) and `shape`
    int64     whole numbers of `shape`
    float32   numbers of `shape`

`shape` defaults to [], for images to [null, null, 3]; int64 and float32 are cast to `dtype` if there is one.
`inputs` and `targets` are a feature, or several as {name of the model's input: feature}. uint8 inputs are pixels:
they become float32 in [0, 1] after augmentation. With `classes`, integer targets are labels, and one outside of
[0, classes) is an error. `class_names`, in the order of the labels, `sample_weight` and `name` (the record's name in
messages) are optional.
"""

import hashlib
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf
import yaml

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.options import section
from hvdtrain.data.arrays import check_range, given_or_held_out
from hvdtrain.data.files import find_data
from hvdtrain.data.source import DataSplits
from hvdtrain.data.sources.class_folders import HELD, SPLITS
from hvdtrain.data.sources.images import all_decoded, image_splits, to_unit
from hvdtrain.data.sources.tfrecord_files import Records, record_files

FILE_NAME = "features.yaml"
Dims = tuple[int | None, ...]


@section
class Feature:
    """One feature of a record."""

    kind: Literal["image", "bytes", "int64", "float32"]
    shape: Dims | None = None
    dtype: str | None = None

    @property
    def dims(self) -> Dims:
        """The shape, or the default of its kind."""
        return self.shape if self.shape is not None else ((None, None, 3) if self.kind == "image" else ())

    @property
    def parser(self) -> tf.io.FixedLenFeature:
        """The parsing spec of TensorFlow."""
        if self.kind in ("image", "bytes"):
            return tf.io.FixedLenFeature([], tf.string)
        return tf.io.FixedLenFeature(list(self.dims), tf.as_dtype(self.kind))


@section
class Description:
    """The features of a record, and their roles in training."""

    features: dict[str, Feature]
    inputs: str | dict[str, str]
    targets: str | dict[str, str]
    sample_weight: str | None = None
    classes: int | None = None
    class_names: tuple[str, ...] | None = None
    name: str | None = None

    @property
    def used(self) -> dict[str, Feature]:
        """The features used in training."""
        return {key: self.features[key] for key in tf.nest.flatten(self._roles)}

    def nest(self, entries: dict[str, Any]) -> tuple[Any, ...]:
        """Arrange values by feature as (inputs, targets[, sample_weight])."""
        return tuple(tf.nest.map_structure(entries.__getitem__, self._roles))

    @property
    def _roles(self) -> tuple[Any, ...]:
        return (self.inputs, self.targets, *([self.sample_weight] if self.sample_weight else []))


def read_description(path: Path) -> Description:
    """Read a description from a YAML file.

    Raises:
        DataError: it cannot be read, or is malformed; names the file and the key.
    """
    import pydantic

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        description: Description = pydantic.TypeAdapter(Description).validate_python(values)
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _refusal(path, f"is not valid YAML: {error}") from None
    except pydantic.ValidationError as error:
        lines = (
            f"  {'.'.join(map(str, problem['loc'])) or 'the file'}: {problem['msg']}. Received: {problem['input']!r}."
            for problem in error.errors()
        )
        raise _refusal(path, "does not fit:\n" + "\n".join(lines)) from None
    _check(description, path)
    return description


def _refusal(path: Path, text: str) -> DataError:
    return DataError(f"The description {path} {text}")


def _check(description: Description, path: Path) -> None:
    try:
        used = description.used
    except KeyError as error:
        known = ", ".join(description.features)
        raise _refusal(path, f"trains on {error.args[0]!r}, which is none of its features ({known}).") from None
    if description.classes is not None and description.classes < 1:
        raise _refusal(path, f"needs at least 1 class. Received: classes: {description.classes}.")
    if description.class_names is not None and len(description.class_names) != description.classes:
        raise _refusal(
            path,
            f"must give each class a name. Received: classes: {description.classes}, and "
            f"{len(description.class_names)} class_names.",
        )
    for key, feature in used.items():
        if feature.kind == "image" and (len(feature.dims) != 3 or feature.dims[2] not in (1, 3, 4) or feature.dtype):
            raise _refusal(
                path,
                f"must give the image {key!r} a shape [height, width, 1, 3 or 4], and no dtype: pixels are bytes.",
            )
        if feature.kind != "image" and None in feature.dims:
            raise _refusal(path, f"leaves a dim of {key!r} open (null): only height and width of images may be.")


class TFRecordSource:
    """Records of TFRecord files as samples: read by offset, verified by checksum, with images decoded.

    Args:
        records: the records.
        description: their features.
        name: the name of the source in messages.
        image_size: height and width to resize the centre square of every image to; 0: no resizing, all must have the
            described size, or else that of the first.

    Raises:
        ConfigError: an image size, but no images.
        DataError: the first record lacks a described feature, or its image is needed for its size and damaged.
    """

    heavy = True

    def __init__(self, records: Records, description: Description, name: str, *, image_size: int = 0) -> None:
        self.name = name
        self.size = len(records)
        self.file_of = records.file_of
        """[samples] the number of each sample's file."""
        self.describe = records.describe
        self._records = records
        self._description = description
        self._used = description.used
        self._resize = image_size
        if image_size and not any(feature.kind == "image" for feature in self._used.values()):
            raise ConfigError(f"--data-args image_size is for images, and {name} has none among what is trained on.")
        records.name_feature = description.name
        missing = [key for key in self._used if key not in records.entries(0)]
        if missing and records.is_whole(0):  # a damaged one is named when it is read
            raise DataError(
                f"{self.describe(0)} has no {missing[0]!r}, which is to be trained on: it {records.held(0)}."
            )
        self._specs = {key: self._spec(key, feature) for key, feature in self._used.items()}
        self.spec = description.nest(self._specs)
        self.finite = not any(spec.dtype.is_floating for spec in tf.nest.flatten(self.spec[:2]))

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        """Return samples by number; a damaged record or a label out of range is an error that names the record."""
        parsed = tf.io.parse_example(
            self._records.tensor(numbers), {key: feature.parser for key, feature in self._used.items()}
        )
        elements = self._description.nest({key: self._decoded(key, parsed[key]) for key in self._used})
        if self._description.classes is None:
            return elements
        targets = tf.nest.map_structure(lambda tensor: self._labels(tensor, numbers), elements[1])
        return elements[0], targets, *elements[2:]

    def fingerprint(self) -> bytes:
        """Return a hash of the records' checksums, and thus of their contents."""
        facts = f"{self._description} {self._resize}".encode()
        return hashlib.sha256(self._records.fingerprint() + facts).digest()

    def _spec(self, key: str, feature: Feature) -> tf.TensorSpec:
        if feature.kind != "image":
            try:
                return tf.TensorSpec(
                    feature.dims, feature.dtype or ("uint8" if feature.kind == "bytes" else feature.kind)
                )
            except TypeError:
                raise DataError(f"The description gives {key!r} an unknown dtype: {feature.dtype!r}.") from None
        height, width, channels = feature.dims
        if self._resize:
            height, width = self._resize, self._resize
        elif height is None or width is None:
            try:
                entry = tf.io.parse_single_example(self._records.read(0), {key: feature.parser})[key]
                found = tf.io.decode_image(entry, channels, expand_animations=False).shape
            except tf.errors.OpError as error:
                raise DataError(f"{self.describe(0)}: {key!r} cannot be decoded ({error.message.strip()}).") from None
            height, width = height or found[0], width or found[1]
        return tf.TensorSpec([height, width, channels], tf.uint8)

    def _decoded(self, key: str, entries: tf.Tensor) -> tf.Tensor:
        """Decode the feature `key` of records [n, …] into tensors of its spec."""
        kind, spec = self._used[key].kind, self._specs[key]
        if kind == "image":
            return all_decoded(entries, spec, resize=bool(self._resize), name=f"the image {key!r}")
        if kind != "bytes":
            return tf.cast(entries, spec.dtype)
        size = spec.shape.num_elements() * spec.dtype.size
        message = f"{key!r} has not the {size} bytes of {spec.dtype.name} {list(spec.shape)}"
        with tf.control_dependencies([tf.debugging.assert_equal(tf.strings.length(entries), size, message)]):
            flat = tf.io.decode_raw(tf.identity(entries), spec.dtype)
        return tf.reshape(flat, [-1, *spec.shape])

    def _labels(self, labels: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
        """Return the labels [n, …] after checking their range."""
        if not labels.dtype.is_integer:
            return labels

        def checked(labels: np.ndarray, numbers: np.ndarray) -> np.ndarray:
            check_range(labels, self._description.classes or 0, lambda place: self.describe(numbers[place]))
            return labels

        return tf.ensure_shape(tf.numpy_function(checked, [labels, numbers], labels.dtype), labels.shape)


def load(
    *, path: str = "", features: str = "", validation: int = 0, validation_path: str = "", image_size: int = 0
) -> DataSplits:
    """Load the samples of TFRecord files; compressed ones (GZIP or ZLIB) are unpacked into the cache.

    Args:
        path: a TFRecord file, a folder of them or a pattern such as "data/train-*". Files belong to the split in their
            names: train, validation (or val), test.
        features: a YAML file with the features of the records; "": features.yaml beside the files.
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
        return TFRecordSource(parts[part], description, name, image_size=image_size)

    held = _held(parts)
    train = source("train", f"{path} (training)" if held else path)
    sources = given_or_held_out(train, source(held, f"{path} ({held})") if held else None, validation)
    scaled = any(spec.dtype == tf.uint8 for spec in tf.nest.flatten(train.spec[0]))
    splits = image_splits(*sources, classes=description.classes, names=description.class_names, held_out=held is None)
    return replace(splits, finish=to_unit if scaled else None)


def _held(parts: Collection[str]) -> str | None:
    """Return the validation split; None if there is none."""
    return next((part for part in HELD if part in parts), None)


def _parts(path: str) -> dict[str, Records]:
    """Return the records by split, which a word in the name of a file or its folder tells; `train` is never empty."""
    parts: dict[str, list[Path]] = {}
    files = record_files(path)
    for file in files:
        words = [*re.split("[^a-z]+", file.name.lower()), file.parent.name.lower()]
        parts.setdefault(next((SPLITS[word] for word in words if word in SPLITS), "train"), []).append(file)
    return {name: Records(mine) for name, mine in (parts if "train" in parts else {"train": files}).items()}


def _description(features: str, records: Records) -> Description:
    """Read the description `features`, or the one beside the records."""
    path = find_data(features) if features else records.folder / FILE_NAME
    if path.is_file():
        return read_description(path)
    raise DataError(
        f"There is no {path}, which says what the records hold: write one, or name it with --data-args features "
        f"FILE (see hvdtrain/data/sources/tfrecord.py). The first record {records.held(0)}."
    )
