"""Reads what a run is to predict, from paths or standard input, by what the run was trained on."""

import glob
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.config.errors import DataError
from hvdtrain.data.prediction.arrays import SUFFIXES, arrays_as_they_are, only_array, read_arrays
from hvdtrain.data.prediction.images import image_files, pixels
from hvdtrain.data.prediction.samples import PredictionSamples
from hvdtrain.data.prediction.tables import table_rows
from hvdtrain.data.preprocessing import Preprocessing
from hvdtrain.data.sources.csv_file import JSON_LINES, TextInMemory

STANDARD_INPUT = "-"
OF_NUMPY = (b"PK\x03\x04", b"\x93NUMPY")
"""First bytes of .npz and .npy files."""
TABLES = (".csv", ".tsv", ".txt", ".data", *JSON_LINES)
PATTERN = "*?["


def samples_from(
    paths: Sequence[str], given: bytes | None, preprocessing: Preprocessing, signature: Any
) -> PredictionSamples:
    """Return the samples at `paths`, or in the bytes `given` on standard input.

        image     image files, folders, tar files and patterns ("photos/*.jpg"), or arrays of pixels; on standard input
                  a path in each line, or an .npz file
        table     a CSV file, or JSON objects in lines (.jsonl); on standard input either
        array     an .npz or .npy file; on standard input its bytes

    Args:
        paths: what the user named.
        given: the bytes of standard input, for the path `-`.
        preprocessing: what the run was trained with.
        signature: the model's inputs; see `RunDescription.inputs`.

    Raises:
        DataError: another kind of file, or one that cannot be used.
    """
    kind = preprocessing.kind
    if kind == "text":
        raise DataError("The run is of text: `python -m hvdtrain generate` continues a text; predict takes no text.")
    if given is not None and not given.strip():
        raise DataError("There is nothing on standard input. A launcher may not pass it on: name a file in place of -.")
    if kind == "table":
        return table_rows(_table(paths, given), _not_none(preprocessing.table))
    if given is not None and given.startswith(OF_NUMPY):
        return _arrays(read_arrays(io.BytesIO(given), "standard input"), preprocessing, signature, "standard input")
    if given is None and any(Path(path).suffix.lower() in SUFFIXES for path in paths):
        file = _one(paths, "an .npz or .npy file")
        return _arrays(read_arrays(file, str(file)), preprocessing, signature, str(file))
    if kind == "image":
        return image_files(_images(paths, given), _not_none(preprocessing.image))
    received = "something else on standard input" if given is not None else ", ".join(paths)
    raise DataError(f"The run's model takes arrays: name an .npz or .npy file. Received: {received}.")


def _arrays(arrays: Any, preprocessing: Preprocessing, signature: Any, name: str) -> PredictionSamples:
    if preprocessing.image is not None:
        return pixels(only_array(arrays, name), preprocessing.image, name)
    return arrays_as_they_are(arrays, signature, name)


def _table(paths: Sequence[str], given: bytes | None) -> Path | TextInMemory:
    if given is not None:
        try:
            return TextInMemory(given.decode("utf-8-sig"), "standard input")
        except UnicodeDecodeError as error:
            raise DataError(f"Standard input is not UTF-8: {error}.") from None
    file = _one(paths, "a CSV file")
    if file.suffix.lower() not in TABLES:
        raise DataError(f"The run is of a table: it predicts the rows of a CSV file, or of .jsonl. Received: {file}.")
    return file


def _one(paths: Sequence[str], what: str) -> Path:
    if len(paths) != 1:
        raise DataError(f"Name {what} by itself. Received: {', '.join(paths)}.")
    file = Path(paths[0]).expanduser()
    if not file.exists():
        raise DataError(f"There is no {file.absolute()}.")
    return file


def _images(paths: Sequence[str], given: bytes | None) -> list[Path]:
    """Return the files and folders of images, with patterns expanded."""
    if given is not None:
        paths = [line for line in given.decode("utf-8", "surrogateescape").splitlines() if line.strip()]
    table = next((path for path in paths if Path(path).suffix.lower() in TABLES), None)
    if table is not None:
        raise DataError(
            f"The run is of images: it predicts image files, folders, tar files, or pixels in an .npz file. Received: "
            f"{table}."
        )
    return [Path(found) for path in paths for found in _expanded(path)]


def _expanded(path: str) -> list[str]:
    whole = str(Path(path).expanduser())
    if not set(PATTERN) & set(whole) or Path(whole).exists():
        return [whole]
    found = sorted(glob.glob(whole, recursive=True))
    if not found:
        raise DataError(f"No file matches {path}.")
    return found


def _not_none(part: Any) -> Any:
    assert part is not None, "of this kind"
    return part
