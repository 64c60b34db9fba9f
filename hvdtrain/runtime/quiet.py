"""Import TensorFlow without the lines its C++ core writes before any log level can be set."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _stderr_set_aside() -> Iterator[None]:
    """Collect what is written to file descriptor 2; show it after all if the body raises."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield
        except BaseException:
            aside.seek(0)
            os.write(saved, aside.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)


def import_tensorflow_quietly() -> None:
    """Import TensorFlow and Keras; their start-up chatter appears only if the import fails.

    `TF_CPP_MIN_LOG_LEVEL`, where the user set it, leaves everything on the console.
    """
    if "tensorflow" in sys.modules:
        return
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        import keras

        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    with _stderr_set_aside():
        import keras  # noqa: F401
        import tensorflow  # noqa: F401
