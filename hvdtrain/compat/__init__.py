"""All private names of Keras, TensorFlow, Horovod and mpi4py.

`keras.py` (layers and models), `keras_attention.py`, `keras_variables.py` (variables and optimizers), `tf_keras.py`,
`tensorflow.py` and `horovod.py` (with mpi4py) wrap private modules, attributes, frames and threads in functions named
by meaning. Each states its assumption about the library and has a contract test in `tests/unit/compat/`, which names
the function and the library's version on failure. A rename shows as an AttributeError; where a change would be silent
(gradients summed twice, full variables in memory, a deadlock), the function checks first and raises
`CompatibilityError`.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hvdtrain.config.errors import CompatibilityError

TESTED_KERAS = ((3, 14), (3, 15))
"""First and last tested minor version of Keras; `setup.cfg` allows no other."""
KERAS_REQUIREMENT = "keras>=3.14,<3.16"
_ADVICE = {
    "keras": f"Run: pip install '{KERAS_REQUIREMENT}'",
    "tensorflow": "Install TensorFlow 2.21.",
    "tf_keras": "Install tf_keras 2.21.",
}


def unlike(library: str, function: Callable[..., Any], reliance: str) -> CompatibilityError:
    """Return the error for a library that violates an assumption of `function`."""
    return CompatibilityError(
        f"{reliance}: {function.__module__}.{function.__name__} relies on it. Received: {library} {version(library)}, "
        f"which does otherwise. {_ADVICE[library]}"
    )


def uses_attribute(kind: type, name: str) -> bool:
    """Return whether a method of `kind` or its bases uses attribute `name`."""
    methods = [method for each in kind.__mro__ for method in vars(each).values() if hasattr(method, "__code__")]
    return any(name in method.__code__.co_names for method in methods)


def untested_keras(installed: str) -> str:
    """Return why a version of Keras may not work, and the fix; empty if tested."""
    first, last = TESTED_KERAS
    if first <= tuple(int(part) for part in installed.split(".")[:2]) <= last:
        return ""
    return (
        f"hvdtrain relies on private names of Keras, and is tested with Keras {first[0]}.{first[1]} to "
        f"{last[0]}.{last[1]}. Installed: Keras {installed}. Run: pip install '{KERAS_REQUIREMENT}'"
    )


def warn_of_untested_keras() -> None:
    """Warn if the installed Keras version is untested, without importing Keras."""
    with suppress(PackageNotFoundError):
        reason = untested_keras(version("keras"))
        if reason:
            warnings.warn(reason, stacklevel=2)


def fingerprint_of(dataset: Any) -> str:
    """Return the fingerprint of a Hugging Face `Dataset`, equal in all processes. Assumes `Dataset._fingerprint`."""
    return str(dataset._fingerprint)
