"""A safe reader of pickled NumPy arrays from untrusted files.

Unpickling calls whatever the file names. Here it may only name what an array consists of, and gets a plain class of
this
module for each: nothing of NumPy is called before the result has been checked.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdtrain.config.errors import DataError

TYPES = {"u1": np.uint8, "i1": np.int8, "i2": np.int16, "i4": np.int32, "i8": np.int64}
"""Permitted dtypes, all in native byte order."""


def read_pickle(data: bytes, where: str) -> Any:
    """Unpickle dicts, lists, numbers, strings and integer arrays; a Python 2 `str` becomes bytes.

    Args:
        data: the pickle.
        where: its name in messages.

    Raises:
        DataError: it is damaged, or contains anything else.
    """
    try:
        return _finished(_Unpickler(data, where).load())
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{where} is no pickle, or damaged: {type(error).__name__}: {error}.") from None


class _DType:
    """The pickled state of a dtype."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = name if isinstance(name, str) else bytes(name).decode("ascii")
        self.order = "|"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if isinstance(state[1], str) else bytes(state[1]).decode("ascii")


class _Array:
    """The pickled state of an array."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.state = (shape, dtype, "F" if fortran else "C", data)

    def array(self) -> np.ndarray:
        shape, dtype, order, data = self.state
        if not isinstance(dtype, _DType) or dtype.name not in TYPES or dtype.order not in ("<", "|", "="):
            raise ValueError(f"an array of type {getattr(dtype, 'name', dtype)}")
        return np.frombuffer(bytes(data), TYPES[dtype.name]).reshape(shape, order=order)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.state = (shape, dtype, order, data)
    return array


def _latin1(text: str, encoding: str) -> bytes:
    """Stand in for `codecs.encode`, for bytes that Python 3 pickled with a Python 2 protocol only."""
    if encoding != "latin1":
        raise ValueError(f"text in the encoding {encoding!r}")
    return text.encode("latin1")


def _allowed() -> dict[tuple[str, str], Callable[..., Any]]:
    allowed: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _DType,
        ("_codecs", "encode"): _latin1,
    }
    for core in ("numpy.core", "numpy._core"):
        allowed[f"{core}.multiarray", "_reconstruct"] = _Array
        allowed[f"{core}.numeric", "_frombuffer"] = _from_buffer
    return allowed


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._where = where
        self._allowed = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise DataError(
                f"{self._where} asks for {module}.{name}, which no arrays need: it was not loaded, as it could run any "
                "code. Use a file from where the data set is published."
            )
        return self._allowed[module, name]


def _finished(thing: Any) -> Any:
    if isinstance(thing, _Array):
        return thing.array()
    if isinstance(thing, dict):
        return {key: _finished(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [_finished(part) for part in thing]
    return thing
