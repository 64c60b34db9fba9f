"""Attributes, functions and methods that are replaced for a while, in one thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


@contextmanager
def replaced(thing: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Patch a function of an object or module, or a method of a class, inside the context, for this thread only.

    Bypasses Keras' attribute tracking.
    """
    thread = threading.get_ident()
    change, remove = (setattr, delattr) if isinstance(thing, type) else (object.__setattr__, object.__delattr__)
    with _Dispatch.changing:
        dispatch = vars(thing).get(name)
        if not isinstance(dispatch, _Dispatch):
            dispatch = _Dispatch(getattr(thing, name), held=name in vars(thing))
            change(thing, name, dispatch)
        dispatch.replacements.setdefault(thread, []).append(value)
    try:
        yield
    finally:
        with _Dispatch.changing:
            dispatch.replacements[thread].pop()
            if not dispatch.replacements[thread]:
                del dispatch.replacements[thread]
            if not dispatch.replacements and dispatch.held:
                change(thing, name, dispatch.original)
            elif not dispatch.replacements:
                remove(thing, name)


def active(thing: Any, name: str) -> Callable[..., Any]:
    """Return the function of `thing` that this thread would call now: for `replaced`, inside other replacements."""
    function = getattr(thing, name)
    return function.active() if isinstance(function, _Dispatch) else function


class _Dispatch:
    """A function or method patched by some threads."""

    changing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, original: Callable[..., Any], *, held: bool) -> None:
        self.original = original
        self.held = held
        """Whether the object or class itself holds it, rather than its class or base."""
        self.replacements: dict[int, list[Callable[..., Any]]] = {}
        """By thread; the last one is active."""

    def active(self) -> Callable[..., Any]:
        replacements = self.replacements.get(threading.get_ident())
        return replacements[-1] if replacements else self.original

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.active()(*args, **options)

    def __get__(self, instance: Any, owner: type) -> Any:
        """Bind what is active, as a method of a class."""
        method: Any = self.active()
        return method.__get__(instance, owner)
