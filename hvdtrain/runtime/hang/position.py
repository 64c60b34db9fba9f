"""Locate a thread by its Python stack: in a collective, a read of data or the user's code."""

import contextlib
import faulthandler
import gc
import itertools
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal

from hvdtrain.compat.tensorflow import function_definitions, is_compiled_call, is_data_read
from hvdtrain.runtime.interrupts import INSTALLED
from hvdtrain.runtime.logs import say

HANG = "hang: "
"""How the failure report of a rank begins that ends a job which hangs."""


def show_own_stacks(rank: int) -> None:
    """Log the stack of every Python thread but our own watchdogs, the main thread's last."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    main, text = threading.main_thread().ident, ""
    for ident, frame in sorted(_frames_of_threads().items(), key=lambda item: item[0] == main):
        name = threads.get(ident, f"thread {ident}")
        if not name.startswith("hvdtrain-"):
            text += f"\n{name}:\n" + "".join(traceback.format_stack(frame))
    say(f"hvdtrain: rank {rank} stands at{text.rstrip()}")


def show_stacks_on_quit() -> None:
    """Have SIGQUIT show where each thread stands, also in C code that holds Python's lock; unless it is handled.

    A shell starts jobs in the background with the signal ignored.
    """
    if signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN):
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # no standard error with a number
            faulthandler.register(signal.SIGQUIT, all_threads=True)


State = Literal["collective", "exchange", "leaving", "reading", "function", "code", "debugger"]
"""collective: in an op of Horovod's, or in a compiled function that is known to hold some; exchange: of the control
channel; leaving: waiting for the others at the end; function: in a compiled function."""

_LIBRARIES = {"tensorflow", "keras", "tf_keras", "horovod"}
_DEBUGGERS = {"pdb", "bdb", "pydevd", "debugpy", "_pydevd_bundle", "ipdb"}
_COLLECTIVE_OPS = ("Horovod", "CollectiveReduce", "CollectiveGather", "CollectiveBcast", "CollectiveAllToAll")
_CHANNEL, _LEAVING = "hvdtrain.runtime.control.rooted", "hvdtrain.runtime.leaving"
_MOST_FUNCTIONS = 200
_MOST_NAMED = 6


@dataclass(frozen=True)
class Position:
    """Position of a thread."""

    state: State
    anchor: FrameType | None
    """The innermost call into TensorFlow, Keras, Horovod or the control channel: another one, where work goes on."""
    call: FrameType | None
    """The call that gave the state its name."""
    where: str
    """The innermost line of the user's own code: "train.py:41 in on_epoch_end"; empty if there is none."""
    collectives: tuple[str, ...] = ()
    """Names, in one of which the thread waits; empty where they are not known."""


def current_position() -> Position:
    """Return where the main thread stands, or, where another one waits in a collective, that one."""
    frames = _frames_of_threads()
    main = threading.main_thread().ident or 0
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith("hvdtrain-")}
    position = position_of(frames.pop(main, sys._getframe()))
    if position.state == "code":
        others = (position_of(frame) for ident, frame in frames.items() if ident not in ours)
        found = next((other for other in others if other.state in ("collective", "function")), position)
        # A thread of a library's or of hvdtrain's holds no line of the user's: the main thread has the call that waits.
        position = replace(found, where=found.where or position.where)
    return position


def position_of(frame: FrameType | None) -> Position:
    """Return where a thread stands whose innermost frame is `frame`."""
    stack = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    own = next((each for each in stack if _is_users(each)), None)
    where = ""
    if own is not None:
        where = f"{own.f_code.co_filename.rpartition('/')[2]}:{own.f_lineno} in {own.f_code.co_name}"
    packages = [_module(each).partition(".")[0] for each in stack]
    if _DEBUGGERS.intersection(packages):
        return Position("debugger", None, None, where)
    calls = zip(stack, packages, strict=True)
    anchor = next((each for each, package in calls if package in _LIBRARIES or _is_channel(each)), None)
    for each in itertools.takewhile(lambda each: not _is_users(each), stack):
        state = _state(each)
        if state is not None:
            if state == "exchange" and any(_module(outer) == _LEAVING for outer in stack):
                state = "leaving"
            return Position(state, anchor, each, where)
    return Position("code", anchor, None, where)


def with_collectives(position: Position) -> Position:
    """Return `position` with the names of the collectives in one of which the thread may wait.

    A compiled function is looked through for that, which takes a while for a large one. One that holds some makes the
    state "collective"; so does one that cannot be looked into.
    """
    if position.call is None or position.state not in ("collective", "function"):
        return position
    try:
        with _garbage_left():
            local = position.call.f_locals
        names = [str(local["name"])] if position.state == "collective" else _collectives_in(local["self"])
    except Exception:  # TensorFlow's insides may change
        return replace(position, state="collective")
    more = ["…"] if len(names) > _MOST_NAMED else []
    return replace(position, state="collective" if names else "function", collectives=(*names[:_MOST_NAMED], *more))


def _frames_of_threads() -> dict[int, FrameType]:
    """Return the innermost frame of each other thread; those that it was called from are made as well."""
    stack = []
    with _garbage_left():
        frames = sys._current_frames()
        frames.pop(threading.get_ident())  # it would hold itself, and all others until garbage is collected
        for innermost in frames.values():
            frame: FrameType | None = innermost
            while frame is not None:
                stack.append(frame)
                frame = frame.f_back
    return frames


@contextlib.contextmanager
def _garbage_left() -> Iterator[None]:
    """Collect no garbage meanwhile.

    Python 3.11 makes a frame for those who look. A collection while it does, which from 3.12 on waits, runs finalizers
    that let the other threads go on: the frame is made for a call that has ended, and whoever reads it crashes; or, in
    `sys._current_frames`, all threads wait for each other.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _state(frame: FrameType) -> State | None:
    """Return the state that a single call of the stack stands for."""
    module, name = _module(frame), frame.f_code.co_name
    if _is_channel(frame):
        return "exchange"
    if module.startswith("horovod.") or (frame.f_code.co_filename == "<string>" and name.startswith("horovod_")):
        return "collective"
    if is_data_read(frame):
        return "reading"
    return "function" if is_compiled_call(frame) else None


def _collectives_in(function: Any) -> list[str]:
    """Return the names of the collectives in a compiled function, and in those that it calls."""
    nodes = (node for definition in function_definitions(function, _MOST_FUNCTIONS) for node in definition.node_def)
    found = [node for node in nodes if node.op.startswith(_COLLECTIVE_OPS)]
    return sorted({node.attr["tensor_name"].s.decode() or node.name for node in found})


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_channel(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_exchange" and _module(frame) == _CHANNEL


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith("<") and INSTALLED.search(file) is None
