"""NumPy arrays: an .npz file, or a folder of .npy files, which are memory-mapped.

Names of arrays, for all samples or for one split:

    inputs, targets, sample_weight      or x, y; sample_weight is optional
    x_train, y_train, x_test, y_test    as in Keras' mnist.npz; also …_validation and …_val

A folder holds x.npy and y.npy, or x_train.npy … likewise. uint8 inputs [samples, height, width] or
[samples, height, width, channels] are pixels, scaled to [0, 1]; the former get a channel dim.
"""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from hvdtrain.config.errors import DataError
from hvdtrain.data.arrays import array_parts, check_range, is_labels
from hvdtrain.data.files import find_data
from hvdtrain.data.source import DataSplits
from hvdtrain.data.sources.images import image_splits
from hvdtrain.data.sources.user_data import classes_of
from hvdtrain.runtime.logs import warn_on_first

NAMES = (("inputs", "x"), ("targets", "y"), ("sample_weight",))
"""Names of inputs, targets and weights."""
TRAINING = ("", "_train")
VALIDATION = ("_validation", "_val", "_test")


def load(*, path: str = "", validation: int = 0, classes: int = 0) -> DataSplits:
    """Load the arrays of an .npz file or of a folder of .npy files, by their names.

    Args:
        path: the file or folder. Its arrays are x and y (or inputs and targets) and, optionally, sample_weight; or
            x_train, y_train, x_test, y_test, as in Keras' mnist.npz.
        validation: samples to hold out if there are no validation arrays; 0: one in ten.
        classes: number of classes; 0: one more than the highest label.

    Raises:
        DataError: `path` does not exist, or cannot be used.
    """
    place = find_data(path)
    arrays = _read(place)
    train = _part(place, arrays, TRAINING)
    if train is None:
        raise DataError(
            f"{place} needs the arrays x and y (or inputs and targets, or x_train and y_train). "
            f"It holds: {', '.join(sorted(arrays)) or 'none'}."
        )
    held_out = _part(place, arrays, VALIDATION)
    if arrays:
        warn_on_first(f"{place} holds arrays that are not used: {', '.join(sorted(arrays))}.", stacklevel=2)
    for elements in (train, held_out) if classes else ():
        if elements is not None and not is_labels(elements[1]):
            raise DataError(
                f"{place}: --data-args classes is for integer labels [samples]. "
                f"Its targets are {elements[1].dtype} {list(elements[1].shape)}."
            )
        if elements is not None:
            check_range(elements[1], classes, lambda number: f"{place}, sample {number}")
    parts = array_parts(train, held_out, validation=validation, name=str(place))
    return image_splits(*parts, classes=classes or classes_of(list(parts)), held_out=held_out is None)


def _read(place: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file or folder by name. Object arrays are refused: unpickling can run any code."""
    files, arrays = sorted(place.glob("*.npy")) if place.is_dir() else [place], {}
    for file in files:
        name = str(file)
        try:
            loaded = np.load(file, mmap_mode="r", allow_pickle=False)
            if isinstance(loaded, np.ndarray) != place.is_dir():
                raise DataError(f"{file}: an array belongs in a folder, as x.npy and y.npy; several in one .npz file.")
            if isinstance(loaded, np.ndarray):
                arrays[file.stem] = loaded
                continue
            with loaded:
                for key in loaded:
                    name = f"The array {key} of {file}"
                    arrays[key] = loaded[key]
        except DataError:
            raise
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{name} is damaged, or holds no NumPy arrays: {error}.") from None
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error.strerror or error}.") from None
    return arrays


def _part(place: Path, arrays: dict[str, np.ndarray], suffixes: tuple[str, ...]) -> tuple[np.ndarray, ...] | None:
    """Pop the arrays of one split from `arrays`; None if it has neither inputs nor targets."""
    for suffix in suffixes:
        named = [next((name + suffix for name in names if name + suffix in arrays), None) for names in NAMES]
        if named[0] is None and named[1] is None:
            continue
        if named[0] is None or named[1] is None:
            missing = NAMES[0 if named[0] is None else 1][-1] + suffix
            raise DataError(f"{place} has {named[0] or named[1]}, but no {missing}.")
        inputs, targets, *weights = (arrays.pop(name) for name in named if name)
        if inputs.dtype == np.uint8 and inputs.ndim == 3:
            inputs = inputs[..., np.newaxis]
        return inputs, targets.astype(np.int32) if is_labels(targets) else targets, *weights
    return None
