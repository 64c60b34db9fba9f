"""The dtypes that a checkpoint may hold: plain numbers, by the names that NumPy and TensorFlow give them."""

import ml_dtypes
import numpy as np

_USUAL = [np.dtype(code) for code in f"?{np.typecodes['AllInteger']}efdFD"]
_NARROW = [
    np.dtype(kind) for kind in vars(ml_dtypes).values() if isinstance(kind, type) and issubclass(kind, np.generic)
]
_OF_NUMBERS = {kind.name: kind for kind in [*_USUAL, *_NARROW]}


def numpy_dtype(name: str) -> np.dtype:
    """Return the dtype `name`.

    Raises:
        ValueError: it is no dtype of plain numbers. One of objects would make references of a file's bytes.
    """
    if name not in _OF_NUMBERS:
        raise ValueError(f"{name!r} is no dtype of numbers")
    return _OF_NUMBERS[name]
