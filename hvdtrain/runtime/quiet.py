"""Start TensorFlow without the lines its C++ core writes whatever the log level."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.runtime.heap import kept_for_good

QUIET = "2"
"""TensorFlow's log level here: errors only."""


@contextmanager
def start_up_chatter_hidden() -> Iterator[None]:
    """Collect what is written to file descriptor 2; show it after all if the body raises.

    Nothing is hidden from a user who asked for it by `TF_CPP_MIN_LOG_LEVEL` 0 or 1, or where there is a GPU, whose
    driver may have something to say.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", QUIET) in ("0", "1") or Path("/dev/nvidiactl").exists():
        yield
        return
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
    """Import TensorFlow and Keras; their start-up chatter appears only if the import fails."""
    if "tensorflow" in sys.modules:
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", QUIET)
    with start_up_chatter_hidden(), kept_for_good():
        import keras  # noqa: F401
        import tensorflow  # noqa: F401
