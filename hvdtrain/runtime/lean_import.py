"""Import Keras without what it would take along for parts that no run uses."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

NOT_FOR_RUNS = ("sklearn", "matplotlib")
"""What Keras imports, where it is installed, for its scikit-learn wrappers and its picture gallery: a third of the time
of importing TensorFlow and Keras. The curves of a run import matplotlib when they are drawn."""


@contextmanager
def left_out(*names: str) -> Iterator[None]:
    """Let packages that are not imported yet look as if they were not installed, within the body."""
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)
