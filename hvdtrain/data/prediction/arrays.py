"""Arrays to predict: an .npz or .npy file, or arrays in memory, as the model takes them."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.config.errors import DataError
from hvdtrain.data.prediction.samples import PredictionSamples, rows_of

SUFFIXES = (".npz", ".npy")
NAMES = ("inputs", "x")
"""Names of the array of a model with one input."""


def read_arrays(file: Path | io.BytesIO, name: str) -> Any:
    """Return the array of an .npy file, or the arrays of an .npz file by name.

    Raises:
        DataError: it is neither, or damaged.
    """
    try:
        # Object arrays are refused: unpickling can run any code.
        loaded = np.load(file, allow_pickle=False)
        return loaded if isinstance(loaded, np.ndarray) else dict(loaded)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{name} is no file of NumPy arrays, or damaged: {error}.") from None
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}.") from None


def only_array(arrays: Any, name: str) -> np.ndarray:
    """Return the one array of inputs: named `inputs` or `x`, or the only one.

    Raises:
        DataError: there are several, or none.
    """
    if not isinstance(arrays, Mapping):
        return np.asarray(arrays)
    chosen = next((arrays[wanted] for wanted in NAMES if wanted in arrays), None)
    if chosen is None and len(arrays) == 1:
        chosen = next(iter(arrays.values()))
    if chosen is None:
        raise DataError(
            f"{name} must hold one array of inputs, or name it x or inputs. It holds: {', '.join(arrays) or 'none'}."
        )
    return np.asarray(chosen)


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
        inputs: Any = {key: _fitting(arrays[key], part, f"{name}, {key}") for key, part in signature.items()}
        return rows_of(inputs, len(next(iter(inputs.values()))), name)
    if isinstance(signature, list):
        raise DataError("The model takes several inputs without names, which no file can tell apart: name them.")
    array = _fitting(only_array(arrays, name), signature, name)
    return rows_of(array, len(array), name)


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
        raise DataError(f"{name} must hold whole numbers ({wanted}). Received: {array.dtype} with other values.")
    return cast
