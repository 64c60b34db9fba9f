"""Python code within a user's tf.data.Dataset, which is the usual reason for slow input."""

from collections.abc import Iterator

import tensorflow as tf

from hvdtrain.runtime.warning import warn_on_first

PYTHON_OPS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
GENERATOR_OP = "GeneratorDataset"


def warn_of_python(dataset: tf.data.Dataset) -> None:
    """Warn if `dataset` calls Python for its elements, in a py_function, a numpy_function or a generator."""
    kinds = python_in(dataset)
    if kinds:
        cure = (
            "Pass a keras.utils.PyDataset with workers=…, or keep the data in files (python -m hvdtrain data pack)."
            if "from_generator" in kinds
            else "Use TensorFlow's own operations in map(), or a keras.utils.PyDataset with workers=…."
        )
        warn_on_first(
            f"The dataset runs Python code for its elements ({' and '.join(kinds)}): Python's lock lets one call run "
            f"at a time, whatever num_parallel_calls says, and training may wait for it. {cure}",
            stacklevel=2,
        )


def python_in(dataset: tf.data.Dataset) -> list[str]:
    """Return which of `from_generator` and `py_function or numpy_function` are in `dataset`."""
    kinds = set()
    for ops in _ops_of_functions(dataset):
        if GENERATOR_OP in ops:
            kinds.add("from_generator")  # it is made of Python functions itself
        elif ops & PYTHON_OPS:
            kinds.add("py_function or numpy_function")
    return sorted(kinds)


def _ops_of_functions(dataset: tf.data.Dataset) -> Iterator[set[str]]:
    """Return the types of operations in each function of `dataset` and of those that it is made of."""
    # The graph of the whole dataset would hold a copy of every array in it; the functions are small.
    for function in dataset._functions():
        graph = function.function.graph.as_graph_def()
        nodes = [graph.node, *(inner.node_def for inner in graph.library.function)]
        yield {node.op for part in nodes for node in part}
    for inner in dataset._inputs():
        yield from _ops_of_functions(inner)
