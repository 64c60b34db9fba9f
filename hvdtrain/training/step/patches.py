"""Patches in effect while a model's step is traced: attributes, class methods in one thread, seeds by replica."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import keras
import tensorflow as tf

from hvdtrain.compat.tensorflow import copied_function


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


@contextmanager
def traced_anew() -> Iterator[None]:
    """Trace every `tf.function` that this thread calls inside the context anew.

    A graph from before holds the original functions, and one that is made inside the context the replacements.
    """
    kind = type(tf.function(_nothing))
    original: Callable[..., Any] = kind.__call__
    copies: dict[int, tuple[Any, Any]] = {}

    def call(function: Any, *args: Any, **options: Any) -> Any:
        _, copied = copies.setdefault(id(function), (function, copied_function(function)))
        return original(copied, *args, **options)

    with replaced(kind, "__call__", call):
        yield


def _nothing() -> None:
    pass


_APART = 7919
"""Distance between the seeds of two replicas."""


@contextmanager
def offset_seeds(replica: int) -> Iterator[None]:
    """Offset TensorFlow's and Keras' seeds by the replica, in this thread.

    The seeds are the same on every rank, which would give all of them the same noise for different samples. A model's
    own `keras.random.SeedGenerator`s are set in `TrainState.seed_generators`.
    """
    graph = tf.compat.v1.get_default_graph()
    seed, following = graph.seed, keras.random.SeedGenerator.next

    def offset(generator: Any, ordered: bool = True) -> Any:
        drawn = following(generator, ordered)
        # Keras requests unordered seeds for random ops without their own.
        return drawn if ordered else drawn + tf.cast(replica * _APART, drawn.dtype)

    graph.seed = None if seed is None else seed + replica * _APART
    try:
        with replaced(keras.random.SeedGenerator, "next", offset):
            yield
    finally:
        graph.seed = seed
