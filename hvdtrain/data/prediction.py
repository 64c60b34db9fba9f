"""Samples to predict: images, rows of a table or arrays, prepared as in training."""

import glob
import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.preprocessing import ImageInputs, Preprocessing, TableInputs
from hvdtrain.data.source import Source
from hvdtrain.data.sources.class_folders import images_at
from hvdtrain.data.sources.images import ImageSource, finish_of, scaled
from hvdtrain.data.sources.table import check_present, encoded, read_table
from hvdtrain.data.sources.table_file import ARROW, JSON_LINES, PARQUET, TableFile

Finish = Callable[..., tuple[Any, ...]]
NUMPY_FILES = (".npz", ".npy")
NUMPY_MAGIC = (b"PK\x03\x04", b"\x93NUMPY")
"""First bytes of .npz and .npy files."""
TABLES = (".csv", ".tsv", ".txt", ".data", *JSON_LINES, *PARQUET, *ARROW)


@dataclass(frozen=True)
class PredictionSamples:
    """Samples to predict, in order."""

    source: Source
    """Inputs as they were given, with zeros for targets."""
    finish: Finish | None
    """Turns a batch of them into inputs of the model; see `DataSplits.finish`."""
    id_name: str
    """Kind of identity of a sample: `path`, or `row`, which counts from 0."""
    identify: Callable[[int], str | int]
    """Returns the identity of a sample, by its number."""

    def inputs(self) -> Any:
        """Return the model's inputs for all samples, as arrays."""
        elements = self.source.gather(tf.range(self.source.size, dtype=tf.int64))
        if self.finish is not None:
            elements = self.finish(*elements)
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), elements[0])


def samples_from(
    paths: Sequence[str], given: bytes | None, preprocessing: Preprocessing, signature: Any
) -> PredictionSamples:
    """Return the samples at `paths`, or in the bytes `given` on standard input.

        image     image files, folders, tar files and patterns ("photos/*.jpg"), or arrays of pixels; on standard input
                  a path in each line, or an .npz file
        table     a CSV, JSON-lines, Parquet or Arrow file; on standard input CSV or JSON objects in lines
        array     an .npz or .npy file; on standard input its bytes

    Args:
        paths: files, folders and patterns.
        given: the bytes of standard input, for the path `-`.
        preprocessing: the preprocessing of the run.
        signature: the model's inputs; see `RunDescription.inputs`.

    Raises:
        DataError: another kind of file, or one that cannot be used.
    """
    kind = preprocessing.kind
    if kind == "text":
        raise DataError("The run is of text: `python -m hvdtrain generate` continues a text; predict takes no text.")
    if given is not None and not given.strip():
        raise DataError("There is nothing on standard input. A launcher may not pass it on: name a file in place of -.")
    if preprocessing.table is not None:
        return table_rows(given if given is not None else _table_file(paths), preprocessing.table)
    if given is not None and given.startswith(NUMPY_MAGIC):
        return _of_arrays(io.BytesIO(given), "standard input", preprocessing, signature)
    if given is None and any(Path(path).suffix.lower() in NUMPY_FILES for path in paths):
        file = _only(paths, "an .npz or .npy file")
        return _of_arrays(file, str(file), preprocessing, signature)
    if preprocessing.image is not None:
        return image_files(_image_paths(paths, given), preprocessing.image)
    received = "something else on standard input" if given is not None else ", ".join(paths)
    raise DataError(f"The run's model takes arrays: name an .npz or .npy file. Received: {received}.")


def _of_arrays(file: Path | io.BytesIO, name: str, preprocessing: Preprocessing, signature: Any) -> PredictionSamples:
    try:
        # Object arrays are refused: unpickling can run any code.
        loaded = np.load(file, allow_pickle=False)
        arrays = loaded if isinstance(loaded, np.ndarray) else dict(loaded)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{name} is not a file of NumPy arrays, or damaged: {error}.") from None
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}.") from None
    if preprocessing.image is not None:
        array, name = _only_array(arrays, name)
        return pixels(array, preprocessing.image, name)
    return arrays_as_they_are(arrays, signature, name)


def _table_file(paths: Sequence[str]) -> Path:
    file = _only(paths, "a table")
    if file.suffix.lower() not in TABLES:
        raise DataError(
            "The run is of a table: it predicts the rows of a CSV, JSON-lines, Parquet or Arrow file. Received: "
            f"{file}."
        )
    return file


def _only(paths: Sequence[str], what: str) -> Path:
    if len(paths) != 1:
        raise DataError(f"Name {what} by itself. Received: {', '.join(paths)}.")
    file = Path(paths[0]).expanduser()
    if not file.exists():
        raise DataError(f"There is no {file.absolute()}.")
    return file


def _image_paths(paths: Sequence[str], given: bytes | None) -> list[Path]:
    """Return the files and folders of images, with patterns expanded."""
    if given is not None:
        paths = [line for line in given.decode("utf-8", "surrogateescape").splitlines() if line.strip()]
    found: list[Path] = []
    for path in paths:
        whole = str(Path(path).expanduser())
        if Path(path).suffix.lower() in TABLES:
            raise DataError(
                "The run is of images: it predicts image files, folders, tar files, or pixels in an .npz file. "
                f"Received: {path}."
            )
        is_pattern = glob.has_magic(whole) and not Path(whole).exists()
        matching = sorted(glob.glob(whole, recursive=True)) if is_pattern else [whole]
        if not matching:
            raise DataError(f"No file matches {path}.")
        found += map(Path, matching)
    return found


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
        DataError: another shape, or values that are not pixels.
    """
    if image.channels == 1 and image.shape[:2] in (array.shape, array.shape[1:]):
        array = array[..., np.newaxis]
    if array.shape == image.shape:
        array = array[np.newaxis]
    if array.shape[1:] != image.shape:
        raise DataError(
            f"{name} must hold images [samples, height, width, channels] of {list(image.shape)} pixels, as the model "
            f"takes them. Received: {array.dtype} {list(array.shape)}. Image files are resized, arrays are not."
        )
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
    return _rows(array, name, partial(_scaled, image=image))


def _scaled(inputs: Any, *rest: Any, image: ImageInputs) -> tuple[Any, ...]:
    return scaled(inputs, image, white=image.white), *rest


def table_rows(rows: Path | bytes | TableFile, table: TableInputs) -> PredictionSamples:
    """Return rows with the columns that the model takes; others, such as the target, are not read.

    Args:
        rows: a file, the bytes of one on standard input, or a table.
        table: the columns of the run.

    Raises:
        DataError: a missing column or value, or a malformed row.
    """
    if not isinstance(rows, TableFile):
        rows = TableFile(rows, table.delimiter, "standard input" if isinstance(rows, bytes) else "")
    kinds: dict[str, bool | None] = {column.name: column.vocabulary is None for column in table.columns}
    found = read_table([rows], kinds)
    check_present(found, kinds, table.missing)
    return _rows(encoded(found, table), rows.name)


def arrays_as_they_are(arrays: Any, signature: Any, name: str) -> PredictionSamples:
    """Return the samples in arrays that the model takes as they are.

    Args:
        arrays: one array, or several by the name of the model's input.
        signature: dtype and shape of each input; see `RunDescription.inputs`.
        name: their name in messages.

    Raises:
        DataError: a missing array, or another shape or dtype.
    """
    if isinstance(signature, Mapping) and not isinstance(signature.get("dtype"), str):
        missing = [key for key in signature if not isinstance(arrays, Mapping) or key not in arrays]
        if missing:
            raise DataError(f"{name} must hold the arrays {', '.join(signature)}. It has no {missing[0]}.")
        return _rows({key: _fitting(arrays[key], part, f"{name}, {key}") for key, part in signature.items()}, name)
    if isinstance(signature, list):
        raise DataError("The model takes several inputs without names, which no file can tell apart: name them.")
    array, name = _only_array(arrays, name)
    return _rows(_fitting(array, signature, name), name)


def _only_array(arrays: Any, name: str) -> tuple[np.ndarray, str]:
    """Return the one array of inputs, named `inputs` or `x`, or the only one, and its name in messages."""
    if not isinstance(arrays, Mapping):
        return np.asarray(arrays), name
    chosen = next((arrays[wanted] for wanted in ("inputs", "x") if wanted in arrays), None)
    if chosen is None and len(arrays) == 1:
        ((key, chosen),) = arrays.items()
        name = f"The array {key!r} of {name}, which has no x or inputs,"
    if chosen is None:
        raise DataError(
            f"{name} must hold one array of inputs, or name it x or inputs. It holds: {', '.join(arrays) or 'none'}."
        )
    return np.asarray(chosen), name


def _fitting(given: Any, signature: Mapping[str, Any], name: str) -> np.ndarray:
    """Return an array [samples, …] of the dtype that the model takes."""
    array, wanted = np.asarray(given), np.dtype(signature["dtype"])
    shape = [None, *signature["shape"]]
    fits = array.ndim == len(shape) and all(dim in (None, size) for dim, size in zip(shape, array.shape, strict=True))
    if not fits:
        text = ", ".join("samples" if dim is None else str(dim) for dim in shape)
        raise DataError(f"{name} must be an array [{text}]. Received: {array.dtype} {list(array.shape)}.")
    cast = array.astype(wanted)
    if wanted.kind in "iu" and not np.array_equal(cast, array):
        raise DataError(f"{name} must hold integers ({wanted}). Received: {array.dtype} with other values.")
    return cast


def _rows(inputs: Any, name: str, finish: Finish | None = None) -> PredictionSamples:
    """Return samples that are rows of arrays [samples, …]."""
    targets = np.zeros(len(tf.nest.flatten(inputs)[0]), np.int32)
    return PredictionSamples(ArraySource((inputs, targets), name), finish, "row", lambda number: number)
