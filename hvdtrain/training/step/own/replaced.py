"""Replacing a method for a while."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object inside the context, past Keras' tracking of attributes."""
    before = {name: vars(thing)[name]} if name in vars(thing) else {}
    object.__setattr__(thing, name, value)
    try:
        yield
    finally:
        object.__delattr__(thing, name)
        for each, original in before.items():
            object.__setattr__(thing, each, original)


@contextmanager
def replaced_in_this_thread(kind: type, name: str, value: Any) -> Iterator[None]:
    """Replace a method of a class inside the context, for calls of this thread; other threads call the original."""
    thread = threading.get_ident()
    with _ByThread.changing:
        method = vars(kind).get(name)
        if not isinstance(method, _ByThread):
            method = _ByThread(getattr(kind, name), inherited=method is None)
            setattr(kind, name, method)
        method.replacements.setdefault(thread, []).append(value)
    try:
        yield
    finally:
        with _ByThread.changing:
            method.replacements[thread].pop()
            if not method.replacements[thread]:
                del method.replacements[thread]
            if not method.replacements and method.inherited:
                delattr(kind, name)
            elif not method.replacements:
                setattr(kind, name, method.original)


class _ByThread:
    """A method that some threads have replaced."""

    changing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, original: Any, *, inherited: bool) -> None:
        self.original = original
        self.inherited = inherited
        self.replacements: dict[int, list[Any]] = {}
        """By thread, the one that counts last."""

    def __get__(self, instance: Any, owner: type) -> Any:
        replacements = self.replacements.get(threading.get_ident())
        method = replacements[-1] if replacements else self.original
        return method.__get__(instance, owner)
