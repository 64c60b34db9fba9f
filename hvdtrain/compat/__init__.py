"""Private names of other libraries, and the only place where they stand.

`keras.py` (layers and models), `keras_variables.py` (variables and optimizers), `tf_keras.py`, `tensorflow.py` and
`horovod.py` (with mpi4py) alone name private modules, attributes, frames and threads of these libraries. Everybody else
calls their functions, which are named by what they mean. Each says what it takes for granted about the library, and has
a contract test in `tests/unit/compat/`, which names the function and the library's version when that no longer holds.

A rename shows as an AttributeError by itself. Where a change would show as nothing at all (gradients summed twice,
whole variables in memory, a job that hangs), the function looks first, and raises `CompatibilityError`.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hvdtrain.config.errors import CompatibilityError

TESTED_KERAS = ((3, 14), (3, 15))
"""The first and the last minor version of Keras that the tests run with; `setup.cfg` allows no other."""
KERAS_REQUIREMENT = "keras>=3.14,<3.16"
_ADVICE = {
    "keras": f"Run: pip install '{KERAS_REQUIREMENT}'",
    "tensorflow": "Install TensorFlow 2.21.",
    "tf_keras": "Install tf_keras 2.21.",
}


def unlike(library: str, function: Callable[..., Any], reliance: str) -> CompatibilityError:
    """Return the error that a library does not do what `function`, of this package, relies on."""
    return CompatibilityError(
        f"{reliance}: {function.__module__}.{function.__name__} relies on it. Received: {library} {version(library)}, "
        f"which does otherwise. {_ADVICE[library]}"
    )


def uses_attribute(kind: type, name: str) -> bool:
    """Whether a method of `kind`, or of a class that it derives from, uses the attribute `name`."""
    methods = [method for each in kind.__mro__ for method in vars(each).values() if hasattr(method, "__code__")]
    return any(name in method.__code__.co_names for method in methods)


def untested_keras(installed: str) -> str:
    """Return why a version of Keras may not do, and what does; empty if hvdtrain is tested with it."""
    first, last = TESTED_KERAS
    if first <= tuple(int(part) for part in installed.split(".")[:2]) <= last:
        return ""
    return (
        f"hvdtrain relies on private names of Keras, and is tested with Keras {first[0]}.{first[1]} to "
        f"{last[0]}.{last[1]}. Installed: Keras {installed}. Run: pip install '{KERAS_REQUIREMENT}'"
    )


def warn_of_untested_keras() -> None:
    """Warn if the installed Keras is not of a version that hvdtrain is tested with; Keras is not imported."""
    with suppress(PackageNotFoundError):
        reason = untested_keras(version("keras"))
        if reason:
            warnings.warn(reason, stacklevel=2)


def fingerprint_of(dataset: Any) -> str:
    """Return what tells the rows of a `datasets.Dataset` (Hugging Face) from those of others, in every process.

    Assumed: `Dataset._fingerprint`.
    """
    return str(dataset._fingerprint)
