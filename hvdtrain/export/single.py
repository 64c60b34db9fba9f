"""The export of one model of a program in one format, by one of its processes for all of them."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.config import errors
from hvdtrain.config.errors import ConfigError, ExportError, UserError
from hvdtrain.export.exporter import Exported, Subject, export
from hvdtrain.export.serving import specs_of
from hvdtrain.export.verify import Samples, drawn_samples

DRAWN = 32
"""Samples that are drawn where none are given."""


def export_one(model: keras.Model, path: Path, format_name: str, samples: Any = None) -> Exported:
    """Write a model to `path`, check it in its own runtime, and return what came out.

    Args:
        model: a built model.
        path: a new file or folder.
        format_name: one of `formats.FORMATS`.
        samples: nest of inputs [samples, …]; None: a few are drawn.

    Raises:
        ConfigError: see `exporter.export`; or a model of unknown inputs, without samples.
        ExportError: what was written is not the model, or cannot run: nothing is left of it then.
    """
    subject = subject_of_model(model, samples)
    (_, written), _ = export(subject, {format_name: path})
    if written.fault:
        for file in (path, path.with_suffix(".bin")):
            shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
        raise ExportError(f"{path} in the format {format_name}: {written.fault}.")
    return written


def subject_of_model(model: keras.Model, samples: Any = None, count: int = DRAWN) -> Subject:
    """Return a model as what is exported, with samples of its inputs to check with.

    Raises:
        ConfigError: its inputs are not known, and there are no samples.
    """
    try:
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        signature = keras.tree.map_structure(lambda tensor: _leaf(tensor.dtype, tensor.shape[1:]), inputs)
    except (AttributeError, ValueError, TypeError):  # of a class of its own, or not built
        if samples is None:
            raise ConfigError(
                f"What {type(model).__name__} takes is known from samples alone: give export samples=x, as for predict."
            ) from None
        arrays = keras.tree.map_structure(_array, samples)
        signature = keras.tree.map_structure(lambda array: _leaf(array.dtype, array.shape[1:]), arrays)
        return Subject(model, signature, Samples(arrays))
    specs = specs_of(signature)
    if samples is None:
        return Subject(model, signature, drawn_samples(specs, count))
    arrays = keras.tree.map_structure_up_to(specs, lambda spec, part: _as(_array(part), spec.dtype), specs, samples)
    return Subject(model, signature, Samples(arrays))


def _array(values: Any) -> np.ndarray:
    """Return an array; numbers of 64 bits, which NumPy makes of Python's, have those of Keras."""
    array = np.asarray(values)
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array


def _as(array: np.ndarray, dtype: str) -> np.ndarray:
    return array if dtype == "string" else array.astype(dtype)


def _leaf(dtype: Any, shape: Any) -> dict[str, Any]:
    strings = isinstance(dtype, np.dtype) and dtype.kind in "USO"
    return {"dtype": "string" if strings else str(dtype), "shape": list(shape)}


def answer_of(model: keras.Model, path: Path, format_name: str, samples: Any) -> dict[str, Any]:
    """Return what `export_one` returns, or the user's mistake, as JSON for the other ranks."""
    try:
        return {**asdict(export_one(model, path, format_name, samples)), "path": None}
    except UserError as error:
        return {"error": type(error).__name__, "message": error.message}
    except Exception as error:  # the other ranks wait for an answer
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return {"error": ExportError.__name__, "message": f"{path} in the format {format_name}: {said}"}


def exported_by(answer: dict[str, Any], path: Path) -> Exported:
    """Return what another rank exported to `path`, or raise its mistake."""
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return replace(Exported(**answer), path=path)
