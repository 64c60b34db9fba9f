"""Which code that is being called is the user's."""

import sys
from types import FrameType


def is_users(frame: FrameType) -> bool:
    """Return whether a frame is outside of Keras, TensorFlow and this package."""
    return frame.f_globals.get("__name__", "").split(".")[0] not in _NOT_USERS


def users_line() -> str:
    """Return the innermost line outside of Keras, TensorFlow and this package that is being called, `file:number`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if "__autograph_generated" not in frame.f_code.co_filename and is_users(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_NOT_USERS = ("hvdtrain", "keras", "tensorflow", "contextlib", "optree", "numpy")
