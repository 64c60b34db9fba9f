"""A source of TFRecord records: random access, checked, parsed and decoded in batches."""

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.files.blobs import Blobs
from hvdtrain.data.files.features import Description, Feature
from hvdtrain.data.files.tfrecord_index import Records
from hvdtrain.data.sources.decoding import all_decoded


class TFRecordSource:
    """Records of TFRecord files as samples, each a tf.train.Example; see `Source`.

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
        """See `Source`; a damaged record or a label out of range is an error that names the record."""
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
        """See `Source`; a hash of the records' checksums, and thus of their contents."""
        facts = f"{self._description} {self._resize}".encode()
        return hashlib.sha256(self._records.fingerprint() + facts).digest()

    def listing(self) -> list[str]:
        """Return name, number of records and combined checksum of each file."""
        return self._records.listing()

    def _check(self, data: bytes, number: int) -> None:
        if not self._records.is_whole(data, number):
            raise DataError(f"{self.describe(number)}: the record is damaged (its checksum is wrong)")
        # TensorFlow would put the bytes into its message, which Python fails to decode.
        if not is_example(data):
            raise DataError(f"{self.describe(number)}: it is no tf.train.Example")

    def _refuse_other_entries(self) -> None:
        """Refuse a description that does not match the first record, unless that is damaged."""
        data = self._records.read(0)
        missing = [key for key in self._used if key not in entries_of(data)]
        if missing and self._records.is_whole(data, 0):
            raise DataError(f"{self.describe(0)} has no {missing[0]!r}, which is to be trained on: it {held(data)}.")

    def _name_of(self, number: int) -> str:
        """Return the name that a record holds; "" if it is lost to damage."""
        key = self._description.name
        if key is None:
            return ""
        try:
            entries = entries_of(self._records.read(number))
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
    """Return the features of a record by name; empty if it is not a tf.train.Example."""
    try:
        return tf.train.Example.FromString(data).features.feature
    except DecodeError:
        return {}


def held(data: bytes) -> str:
    """Describe the features of a record."""
    entries = entries_of(data)
    kinds = {key: entries[key].WhichOneof("kind") or "nothing" for key in sorted(entries)}
    listed = ", ".join(f"{key} ({kind.removesuffix('_list')})" for key, kind in kinds.items())
    return f"holds {listed}" if listed else "is no tf.train.Example, or an empty one"


def is_example(data: bytes) -> bool:
    """Whether a record parses as a tf.train.Example."""
    try:
        tf.train.Example.FromString(data)
    except DecodeError:
        return False
    return True


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
