"""Images to predict: files, or arrays of pixels."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.config.errors import DataError
from hvdtrain.data.files.class_folders import images_at
from hvdtrain.data.prediction.samples import PredictionSamples, rows_of
from hvdtrain.data.preprocessing import ImageInputs
from hvdtrain.data.sources.decoding import finish_of, scaled
from hvdtrain.data.sources.images import ImageSource


def image_files(paths: Sequence[Path], image: ImageInputs) -> PredictionSamples:
    """Return the images in files, folders and tar files; those of another size are resized, as in training.

    Raises:
        DataError: there are none.
    """
    blobs, names = images_at(paths)
    source = ImageSource(blobs, np.zeros(len(blobs), np.int32), "images", channels=image.channels, shape=image.shape)
    return PredictionSamples(source, finish_of(image), "path", names.__getitem__)


def pixels(array: np.ndarray, image: ImageInputs, name: str) -> PredictionSamples:
    """Return the images in an array of pixels of any dtype, [samples, height, width, channels] or one of them.

    Raises:
        DataError: another shape, or values that are no pixels.
    """
    shaped = _shaped(array, image, name)
    _check_values(shaped, image, name)
    return rows_of(shaped, len(shaped), name, partial(_finish, image=image))


def _finish(inputs: Any, *rest: Any, image: ImageInputs) -> tuple[Any, ...]:
    return scaled(inputs, image, white=image.white), *rest


def _shaped(array: np.ndarray, image: ImageInputs, name: str) -> np.ndarray:
    """Return [samples, height, width, channels]."""
    if image.channels == 1 and image.shape[:2] in (array.shape, array.shape[1:]):
        array = array[..., np.newaxis]
    if array.shape == image.shape:
        array = array[np.newaxis]
    if array.shape[1:] != image.shape:
        raise DataError(
            f"{name} must hold images [samples, height, width, channels] of {list(image.shape)} pixels, as the model "
            f"takes them. Received: {array.dtype} {list(array.shape)}. Image files are resized, arrays are not."
        )
    return array


def _check_values(array: np.ndarray, image: ImageInputs, name: str) -> None:
    if array.dtype.kind not in "uif":
        raise DataError(f"{name} must hold numbers. Received: {array.dtype}.")
    lowest, highest = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    if not 0 <= lowest <= highest <= image.white:
        raise DataError(
            f"{name} must hold pixels from 0 to {image.white:g}, as the run was trained on. Received: values from "
            f"{lowest:g} to {highest:g}."
        )
    if array.dtype.kind == "f" and 0 < highest <= 1:
        raise DataError(
            f"{name} must hold pixels from 0 to {image.white:g}, which are scaled here. Received: values from "
            f"{lowest:g} to {highest:g}, which look scaled already: pass the pixels as they were."
        )
