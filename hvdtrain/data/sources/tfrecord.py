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
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf
import yaml
from google.protobuf.message import DecodeError

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.section import section
from hvdtrain.data.arrays import hold_out
from hvdtrain.data.blobs import Blobs
from hvdtrain.data.files import find_data
from hvdtrain.data.preprocessing import ImageInputs, Preprocessing
from hvdtrain.data.source import DataSplits, Source, input_shape
from hvdtrain.data.sources.class_folders import SPLITS
from hvdtrain.data.sources.images import all_decoded, to_unit
from hvdtrain.data.sources.tfrecord_files import Records, record_files, records_of

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
        nests = [self.inputs, self.targets, *([self.sample_weight] if self.sample_weight else [])]
        keys = [key for nest in nests for key in ([nest] if isinstance(nest, str) else nest.values())]
        return {key: self.features[key] for key in keys}


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
        raise _refusal(path, "does not fit:\n" + "\n".join(map(_line, error.errors()))) from None
    _check(description, path)
    return description


def _refusal(path: Path, text: str) -> DataError:
    return DataError(f"The description {path} {text}")


def _line(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    return f"  {place or 'the file'}: {problem['msg']}. Received: {problem['input']!r}."


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
    """Records of TFRecord files as samples, each a tf.train.Example.

    Records are read by offset and verified by checksum; images are decoded.

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
        self._records = records
        self._description = description
        self._used = description.used
        self._resize = image_size
        self.file_of = records.file_of
        """[samples] the number of each sample's file."""
        if image_size and not any(feature.kind == "image" for feature in self._used.values()):
            raise ConfigError(f"--data-args image_size is for images, and {name} has none among what is trained on.")
        index = records.index
        self._blobs = Blobs(
            records.files, records.file_of, index.offsets, index.lengths, names=records.place, check=self._check
        )
        self._refuse_other_entries()
        self._specs = {key: self._spec(key, feature) for key, feature in self._used.items()}
        self.spec = self._nest(self._specs)
        self.finite = not any(spec.dtype.is_floating for spec in tf.nest.flatten(self.spec[:2]))

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        """Return samples by number; a damaged record or a label out of range is an error that names the record."""
        records = self._blobs.tensor(numbers)
        parsed = tf.io.parse_example(records, {key: _parser(feature) for key, feature in self._used.items()})
        elements = self._nest({key: self._decoded(key, parsed[key]) for key in self._used})
        if self._description.classes is None:
            return elements
        targets = tf.nest.map_structure(lambda tensor: self._labels(tensor, numbers), elements[1])
        return elements[0], targets, *elements[2:]

    def describe(self, number: int) -> str:
        """Return file, record (from 0) and the name that the record holds."""
        place, name = self._records.place(int(number)), self._name_of(int(number))
        return f"{place} ({name})" if name else place

    def fingerprint(self) -> bytes:
        """Return a hash of the records' checksums, and thus of their contents."""
        facts = f"{self._description} {self._resize}".encode()
        return hashlib.sha256(self._records.fingerprint() + facts).digest()

    def listing(self) -> list[str]:
        """Return name, number of records and combined checksum of each file."""
        return self._records.listing()

    def _check(self, data: bytes, number: int) -> None:
        if not self._records.is_whole(data, number):
            raise DataError(f"{self.describe(number)}: the record is damaged (its checksum is wrong)")
        # TensorFlow would put the bytes into its message, which Python fails to decode.
        if entries_of(data) is None:
            raise DataError(f"{self.describe(number)}: it is not a tf.train.Example")

    def _refuse_other_entries(self) -> None:
        """Refuse a description that does not match the first record, unless that is damaged."""
        data = self._records.read(0)
        missing = [key for key in self._used if key not in (entries_of(data) or ())]
        if missing and self._records.is_whole(data, 0):
            raise DataError(f"{self.describe(0)} has no {missing[0]!r}, which is to be trained on: it {held(data)}.")

    def _name_of(self, number: int) -> str:
        """Return the name that a record holds; "" if it is lost to damage."""
        key = self._description.name
        if key is None:
            return ""
        try:
            entries = entries_of(self._records.read(number)) or {}
            return str(entries[key].bytes_list.value[0].decode()) if key in entries else ""
        except (IndexError, UnicodeDecodeError, DataError):
            return ""

    def _nest(self, entries: dict[str, Any]) -> tuple[Any, ...]:
        """Arrange values by feature as (inputs, targets[, sample_weight])."""
        description = self._description
        parts = [
            description.inputs,
            description.targets,
            *([description.sample_weight] if description.sample_weight else []),
        ]
        return tuple(tf.nest.map_structure(entries.__getitem__, part) for part in parts)

    def _spec(self, key: str, feature: Feature) -> tf.TensorSpec:
        if feature.kind != "image":
            return tf.TensorSpec(feature.dims, _dtype(key, feature))
        height, width, channels = feature.dims
        if self._resize:
            height, width = self._resize, self._resize
        elif height is None or width is None:
            found = self._first_image(key, channels).shape
            height, width = height or found[0], width or found[1]
        return tf.TensorSpec([height, width, channels], tf.uint8)

    def _first_image(self, key: str, channels: int | None) -> tf.Tensor:
        try:
            entry = tf.io.parse_single_example(self._blobs.read(0), {key: tf.io.FixedLenFeature([], tf.string)})[key]
            return tf.io.decode_image(entry, channels, expand_animations=False)
        except tf.errors.OpError as error:
            raise DataError(f"{self.describe(0)}: {key!r} cannot be decoded ({error.message.strip()}).") from None

    def _decoded(self, key: str, entries: tf.Tensor) -> tf.Tensor:
        """Decode the feature `key` of records [n, …] into tensors of its spec."""
        feature, spec = self._used[key], self._specs[key]
        if feature.kind == "image":
            return all_decoded(entries, spec, resize=bool(self._resize), name=f"the image {key!r}")
        if feature.kind == "bytes":
            return _raw(key, entries, spec)
        return tf.cast(entries, spec.dtype)

    def _labels(self, labels: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
        """Return the labels [n, …] after checking their range."""
        if not labels.dtype.is_integer:
            return labels
        seen = tf.numpy_function(self._refuse_strange, [labels, numbers], labels.dtype)
        return tf.ensure_shape(seen, labels.shape)

    def _refuse_strange(self, labels: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        classes = self._description.classes
        assert classes is not None, "asked by the caller"
        strange = np.argwhere((labels < 0) | (labels >= classes))
        if len(strange):
            first = tuple(strange[0])
            where = self.describe(int(numbers[first[0]]))
            raise DataError(f"{where}: the label {labels[first]} is outside of 0 to {classes - 1}")
        return labels


def entries_of(data: bytes) -> Any:
    """Return the features of a record by name; None if it is not a tf.train.Example."""
    try:
        return tf.train.Example.FromString(data).features.feature
    except DecodeError:
        return None


def held(data: bytes) -> str:
    """Describe the features of a record."""
    entries = entries_of(data) or {}
    kinds = {key: entries[key].WhichOneof("kind") or "nothing" for key in sorted(entries)}
    listed = ", ".join(f"{key} ({kind.removesuffix('_list')})" for key, kind in kinds.items())
    return f"holds {listed}" if listed else "is not a tf.train.Example, or is an empty one"


def _parser(feature: Feature) -> tf.io.FixedLenFeature:
    if feature.kind in ("image", "bytes"):
        return tf.io.FixedLenFeature([], tf.string)
    return tf.io.FixedLenFeature(list(feature.dims), tf.as_dtype(feature.kind))


def _dtype(key: str, feature: Feature) -> tf.DType:
    name = feature.dtype or ("uint8" if feature.kind == "bytes" else feature.kind)
    try:
        return tf.as_dtype(name)
    except TypeError:
        raise DataError(f"The description gives {key!r} an unknown dtype: {name!r}.") from None


def _raw(key: str, entries: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    """Return the tensors whose bytes are `entries` [n]."""
    size = spec.shape.num_elements() * spec.dtype.size
    message = f"{key!r} has not the {size} bytes of {spec.dtype.name} {list(spec.shape)}"
    with tf.control_dependencies([tf.debugging.assert_equal(tf.strings.length(entries), size, message)]):
        flat = tf.io.decode_raw(tf.identity(entries), spec.dtype)
    return tf.reshape(flat, [-1, *spec.shape])


def load(
    *, path: str = "", features: str = "", validation: int = 0, validation_path: str = "", image_size: int = 0
) -> DataSplits:
    """Load the samples of TFRecord files; compressed ones (GZIP or ZLIB) are unpacked into the cache.

    Args:
        path: a TFRecord file, a folder of them or a pattern such as "data/train-*". Files belong to the split in their
            names: train, validation (or val), test.
        features: the description of the records (see the module); default: features.yaml beside the files.
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

    train, validated = _split(source, parts, validation)
    finish = to_unit if any(spec.dtype == tf.uint8 for spec in tf.nest.flatten(train.spec[0])) else None
    inputs = train.spec[0]
    pixels = isinstance(inputs, tf.TensorSpec) and inputs.dtype == tf.uint8 and inputs.shape.rank == 3
    return DataSplits(
        train,
        validated,
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
        f"FILE (see hvdtrain/data/sources/tfrecord.py). The first record {held(records.read(0))}."
    )
