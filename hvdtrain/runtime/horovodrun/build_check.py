"""What Horovod was built with, asked of its library.

Horovod's launcher imports all of TensorFlow to ask, which takes it seconds before it starts the first rank. The library
and those of TensorFlow that it is linked to are loaded in a fraction of a second.
"""

import ctypes
import importlib.util
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_LIBRARIES = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")
"""In the order in which they are loaded: the second needs the first."""


def answer_of_library(question: Callable[[Any], Any]) -> Any:
    """Return `question(library)` for Horovod's library for TensorFlow; None if it cannot be loaded.

    As in Horovod's launcher, it is loaded in a process of its own: nothing that it brings along stays in this one.
    """
    context = get_context("fork")  # the question is a function within a function, which is not pickled
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(question, sender), daemon=True)
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        child.join()


def _answer(question: Callable[[Any], Any], sender: Connection) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # TensorFlow's libraries write lines when they are loaded
        os.dup2(nowhere, output)
    with suppress(Exception):  # without an answer, Horovod's own check is made, and says what is wrong
        sender.send(question(_library()))


def _library() -> Any:
    from horovod.common.basics import HorovodBasics

    for name in _LIBRARIES:
        ctypes.CDLL(str(_folder_of("tensorflow") / name), ctypes.RTLD_GLOBAL)
    return HorovodBasics(str(_folder_of("horovod") / "tensorflow" / "__init__.py"), "mpi_lib")


def _folder_of(package: str) -> Path:
    """Return the folder of a package that is installed, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ImportError(f"{package} is not installed")
    return Path(found.origin).parent
