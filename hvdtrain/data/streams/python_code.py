"""Detection of Python code inside a user's tf.data.Dataset, the usual cause of slow input."""

from collections.abc import Iterator

import tensorflow as tf

from hvdtrain.compat.tensorflow import inputs_of, ops_of_functions
from hvdtrain.runtime.warning import warn_on_first

PYTHON_OPS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
GENERATOR_OP = "GeneratorDataset"


def warn_of_python(dataset: tf.data.Dataset) -> None:
    """Warn if `dataset` calls Python for its elements: py_function, numpy_function or from_generator."""
    kinds = python_in(dataset)
    if kinds:
        fix = (
            "Pass a keras.utils.PyDataset with workers=…, or keep the data in files (python -m hvdtrain data pack)."
            if "from_generator" in kinds
            else "Use TensorFlow's own operations in map(), or a keras.utils.PyDataset with workers=…."
        )
        warn_on_first(
            f"The dataset runs Python code for its elements ({' and '.join(kinds)}): Python's lock lets one call run "
            f"at a time, whatever num_parallel_calls says, and training may wait for it. {fix}",
            stacklevel=2,
        )


def python_in(dataset: tf.data.Dataset) -> list[str]:
    """Return the kinds of Python calls in `dataset`: `from_generator`, `py_function or numpy_function`."""
    kinds = set()
    for ops in _ops_of_functions(dataset):
        if GENERATOR_OP in ops:
            kinds.add("from_generator")  # it is made of Python functions itself
        elif ops & PYTHON_OPS:
            kinds.add("py_function or numpy_function")
    return sorted(kinds)


def _ops_of_functions(dataset: tf.data.Dataset) -> Iterator[set[str]]:
    """Yield the op types of each function of `dataset` and of the datasets it is built from."""
    yield from ops_of_functions(dataset)
    for inner in inputs_of(dataset):
        yield from _ops_of_functions(inner)
