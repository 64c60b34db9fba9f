"""Python's garbage collector beside a library as large as TensorFlow."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_for_good() -> Iterator[None]:
    """Leave what the body creates out of all garbage collections to come; collect nothing meanwhile.

    TensorFlow and Keras are some million objects that live until the process ends. Looking through them again and
    again takes a third of the time of importing them, much of that of tracing, and a second at the process's end.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
