"""Images that are decoded as they are read: class folders, as a folder or within a tar file."""

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.files.blobs import Blobs
from hvdtrain.data.files.class_folders import Found, scan
from hvdtrain.data.files.places import find_data
from hvdtrain.data.source import Source
from hvdtrain.data.sources.decoding import all_decoded, to_unit
from hvdtrain.data.splits import DataSplits
from hvdtrain.data.subset import Subset, hold_out


class ImageSource:
    """Encoded images, decoded to bytes of pixels [height, width, channels], and their labels; see `Source`.

    Args:
        blobs: the encoded images.
        labels: [images] labels.
        name: what messages call it.
        size: height and width to bring every image to, cutting out the middle square first; 0 leaves them as they
            are, and all must be like the first.
        channels: 1 for grey, 3 for colours.

    Raises:
        DataError: the first image cannot be decoded.
    """

    finite = True
    heavy = True

    def __init__(self, blobs: Blobs, labels: np.ndarray, name: str, *, size: int = 0, channels: int = 3) -> None:
        self.name = name
        self.size = len(blobs)
        self.file_of = blobs.file_of
        self._blobs = blobs
        self._labels = np.asarray(labels, np.int32)
        self._resize = size
        self._channels = channels
        shape = (size, size, channels) if size else self._first_shape()
        self.spec = (tf.TensorSpec(shape, tf.uint8), tf.TensorSpec([], tf.int32))

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        """See `Source`."""
        encoded = self._blobs.tensor(numbers)
        images = all_decoded(encoded, self.spec[0], resize=self._resize, name="the image")
        return images, tf.gather(self._labels, numbers)

    def describe(self, number: int) -> str:
        """See `Source`."""
        return self._blobs.describe(number)

    def fingerprint(self) -> bytes:
        """See `Source`; of the images it is names and sizes."""
        facts = f"{self._resize} {self._channels}".encode()
        return hashlib.sha256(self._blobs.fingerprint() + self._labels.tobytes() + facts).digest()

    def listing(self) -> list[str]:
        """Return name and size of each image; see `Blobs.listing`."""
        return self._blobs.listing()

    def version(self) -> bytes:
        """Return what differs when the files have been changed; see `Blobs.version`."""
        return self._blobs.version()

    def _first_shape(self) -> Any:
        try:
            return tf.io.decode_image(self._blobs.read(0), self._channels, expand_animations=False).shape
        except tf.errors.OpError as error:
            raise DataError(f"{self.describe(0)}: the image cannot be decoded ({error.message.strip()}).") from None


def load(*, path: str = "", validation: int = 0, image_size: int = 0, channels: int = 3) -> DataSplits:
    """Return images [height, width, channels] in [0, 1] and the numbers of their class folders.

    Args:
        path: a folder of class folders of JPEG or PNG files, or a tar file (also .tar.gz, .bz2, .xz) of one; above
            the class folders there may be train/ and validation/ (or val/, test/).
        validation: images to hold out for validation where there is no folder for it; 0: one of ten.
        image_size: height and width to bring all to; 0 for images of one size.
        channels: 1 for grey, 3 for colours.

    Raises:
        DataError: nothing is there, or what is there cannot be used.
    """
    if image_size < 0 or channels not in (1, 3):
        raise ConfigError(
            f"class_folders takes image_size 0 or more, and 1 or 3 channels. Received: image_size={image_size}, "
            f"channels={channels}."
        )
    found = scan(find_data(path))
    source = ImageSource(found.blobs, found.labels, str(found.path), size=image_size, channels=channels)
    train, held = split(source, found, validation)
    return DataSplits(train, held, tuple(source.spec[0].shape), len(found.classes), finish=to_unit)


def split(source: Source, found: Found, validation: int) -> tuple[Subset, Subset]:
    """Return training and validation samples: by their folders, else `validation` of each class's share held out."""
    for held in ("validation", "test"):
        if (found.splits == held).any():
            if validation:
                raise ConfigError(f"{found.path} has images for {held}: leave out --data-args validation.")
            parts = [np.flatnonzero(found.splits == name) for name in ("train", held)]
            return Subset(source, parts[0], f"{source.name} (training)"), Subset(
                source, parts[1], f"{source.name} ({held})"
            )
    return hold_out(source, validation, found.labels)
