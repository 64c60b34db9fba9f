"""Encoded images: decoding, resizing and scaling, and `--data class_folders`."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.arrays import Subset, hold_out
from hvdtrain.data.blobs import Blobs
from hvdtrain.data.files import find_data
from hvdtrain.data.preprocessing import ImageInputs, Preprocessing, listed_numbers
from hvdtrain.data.source import DataSplits, Source, input_shape
from hvdtrain.data.sources.class_folders import HELD, scan


def all_decoded(encoded: tf.Tensor, spec: tf.TensorSpec, *, resize: bool, name: str) -> tf.Tensor:
    """Decode JPEG or PNG images [n] to uint8 pixels [n, height, width, channels].

    A batch is decoded by one thread, since batches are decoded in parallel.

    Args:
        encoded: the files' bytes, strings.
        spec: the expected shape and dtype of one image.
        resize: resize the largest centre of its proportions to the size of `spec`, bilinear and with antialiasing;
            False: each must have that size.
        name: the name of one in the error if it has another size.
    """
    shape = list(spec.shape)
    height, width, channels = shape
    message = f"{name} is not {shape} in size, as the first one is: bring all to one with --data-args image_size"

    # Not converted by AutoGraph: an error then begins with its cause, not with TensorFlow's traceback.
    @tf.autograph.experimental.do_not_convert
    def one(file: tf.Tensor) -> tf.Tensor:
        image = tf.io.decode_image(file, channels, expand_animations=False)
        whole = tf.shape(image)
        if not resize:
            with tf.control_dependencies([tf.debugging.assert_equal(whole, shape, message)]):
                return tf.ensure_shape(tf.identity(image), shape)
        rows = tf.maximum(tf.minimum(whole[0], whole[1] * height // width), 1)
        columns = tf.maximum(tf.minimum(whole[1], whole[0] * width // height), 1)
        middle = tf.image.crop_to_bounding_box(image, (whole[0] - rows) // 2, (whole[1] - columns) // 2, rows, columns)
        pixels = tf.image.resize(middle, [height, width], antialias=True)
        return tf.cast(tf.clip_by_value(tf.round(pixels), 0.0, 255.0), tf.uint8)

    return tf.map_fn(one, encoded, fn_output_signature=spec)


def to_unit(inputs: Any, *rest: Any) -> tuple[Any, ...]:
    """Scale uint8 inputs to float32 in [0, 1]."""
    return tf.nest.map_structure(lambda t: scaled(t) if t.dtype == tf.uint8 else t, inputs), *rest


def scaled(pixels: tf.Tensor, image: ImageInputs | None = None, *, white: float = 255.0) -> tf.Tensor:
    """Scale pixels to float32 in [0, 1], then apply the mean and std of `image`.

    Args:
        pixels: [..., channels], of any dtype.
        image: mean and std to apply, if any.
        white: the value that becomes 1.
    """
    inputs = tf.cast(pixels, tf.float32) * (1.0 / white)
    if image is not None and image.mean:
        inputs = inputs - tf.constant(image.mean, tf.float32)
    if image is not None and image.std:
        inputs = inputs / tf.constant(image.std, tf.float32)
    return inputs


def finish_of(image: ImageInputs) -> Callable[..., tuple[Any, ...]]:
    """Return the last transformation of batches of decoded images, see `DataSplits.finish`."""
    return lambda inputs, *rest: (scaled(inputs, image), *rest)


class ImageSource:
    """A source of encoded images, decoded to uint8 pixels [height, width, channels], and labels; see `Source`.

    Args:
        blobs: the encoded images.
        labels: [images] labels.
        name: its name in messages.
        size: height and width to resize the centre square of every image to; 0: no resizing, all must have the
            size of the first.
        channels: 1 for grey, 3 for colour.
        shape: height, width and channels to resize the centre of every image to, in place of `size`.

    Raises:
        DataError: the first image cannot be decoded.
    """

    finite = True
    heavy = True

    def __init__(
        self,
        blobs: Blobs,
        labels: np.ndarray,
        name: str,
        *,
        size: int = 0,
        channels: int = 3,
        shape: tuple[int, int, int] | None = None,
    ) -> None:
        self.name = name
        self.size = len(blobs)
        self.file_of = blobs.file_of
        self.describe = blobs.describe
        self.version = blobs.version
        self._blobs = blobs
        self._labels = np.asarray(labels, np.int32)
        self._resize = size
        self._channels = channels
        self._as_they_are = shape is None and not size
        shape = shape or ((size, size, channels) if size else self._first_shape())
        self.spec = (tf.TensorSpec(shape, tf.uint8), tf.TensorSpec([], tf.int32))

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        encoded = self._blobs.tensor(numbers)
        images = all_decoded(encoded, self.spec[0], resize=not self._as_they_are, name="the image")
        return images, tf.gather(self._labels, numbers)

    def fingerprint(self) -> bytes:
        """Return a hash of names and sizes, not of pixels."""
        facts = f"{self._resize} {self._channels}".encode()
        return hashlib.sha256(self._blobs.fingerprint() + self._labels.tobytes() + facts).digest()

    def _first_shape(self) -> Any:
        try:
            return tf.io.decode_image(self._blobs.read(0), self._channels, expand_animations=False).shape
        except tf.errors.OpError as error:
            raise DataError(f"{self.describe(0)}: the image cannot be decoded ({error.message.strip()}).") from None


def image_splits(
    train: Source, held: Source, *, classes: int | None, names: Any = None, held_out: bool = False
) -> DataSplits:
    """Return the splits of samples of any kind; uint8 images become float32 in [0, 1] after augmentation.

    Args:
        train: the training samples.
        held: the validation samples.
        classes: number of classes; None if the targets are not labels.
        names: their names, if they have any.
        held_out: whether the validation samples were held out of the training data.
    """
    inputs, shape = train.spec[0], input_shape(train)
    pixels = isinstance(inputs, tf.TensorSpec) and inputs.dtype == tf.uint8 and inputs.shape.rank == 3
    return DataSplits(
        train,
        held,
        shape,
        classes,
        finish=to_unit if pixels else None,
        preprocessing=Preprocessing(names, image=ImageInputs(*shape) if pixels else None),
        held_out=held_out,
    )


def load(
    *,
    path: str = "",
    validation: int = 0,
    image_size: int = 0,
    channels: int = 3,
    mean: str | float | None = None,
    std: str | float | None = None,
) -> DataSplits:
    """Load images [height, width, channels] in [0, 1] and the indices of their class folders.

    Args:
        path: a folder of class folders of JPEG or PNG files, or a tar file (also .tar.gz, .bz2, .xz) of one; above
            the class folders there may be train/ and validation/ (or val/, test/).
        validation: images to hold out if there is no validation folder; 0: one in ten.
        image_size: height and width to resize all to; 0 if they have one size.
        channels: 1 for grey, 3 for colour.
        mean: subtracted from the values in [0, 1]: a number, or one for each channel, separated by commas.
        std: divisor after that; likewise.

    Raises:
        DataError: `path` does not exist, or cannot be used.
    """
    if image_size < 0 or channels not in (1, 3):
        raise ConfigError(
            f"class_folders takes image_size 0 or more, and 1 or 3 channels. Received: image_size={image_size}, "
            f"channels={channels}."
        )
    found = scan(find_data(path))
    source = ImageSource(found.blobs, found.labels, str(found.path), size=image_size, channels=channels)
    held = next((split for split in HELD if (found.splits == split).any()), None)
    if held is not None and validation:
        raise ConfigError(f"{found.path} has images for {held}: leave out --data-args validation.")
    parts = (
        hold_out(source, validation, found.labels)
        if held is None
        else [
            Subset(source, np.flatnonzero(found.splits == split), f"{source.name} ({title})")
            for split, title in (("train", "training"), (held, held))
        ]
    )
    means, stds = listed_numbers("mean", mean, channels), listed_numbers("std", std, channels)
    if 0 in stds:
        raise ConfigError(f"--data-args std divides the pixels: it must not be 0. Received: {std!r}.")
    height, width, _ = source.spec[0].shape
    image = ImageInputs(height, width, channels, mean=means, std=stds)
    return DataSplits(
        parts[0],
        parts[1],
        image.shape,
        len(found.classes),
        finish=finish_of(image),
        preprocessing=Preprocessing(tuple(found.classes), image=image),
        held_out=held is None,
    )
