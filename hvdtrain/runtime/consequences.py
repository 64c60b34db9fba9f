"""Find the cause of an error: another rank's failure, or the limit on open files."""

import errno
import re
import resource

_CUT_OFF = {"UnknownError", "AbortedError"}
"""TensorFlow's errors of an exchange that was cut off. Any other one of an op of Horovod is a mistake of this rank."""

_OF_HOROVOD = re.compile(
    r"\[Op:Horovod\w+\]"  # computed at once
    # In a graph, where TensorFlow tells in which calls the failing node was made: the last one is of its op.
    r"|^Detected at node .* defined at \(most recent call last\):\n"
    r'(?:\s*File "[^"\n]*", line \d+, in .*\n)*?\s*File "<string>", line \d+, in horovod_\w+\n(?!\s*File ")'
    # Of some functions it tells the node alone, which has the name that `collective_name` gave it.
    r"|\[\[\{\{node (?:[\w.-]+/)*[\w.-]+\.[0-9a-f]{8}\}\}\]\] \[Op:__inference_",
    re.MULTILINE,
)
"""Where TensorFlow says of which op an error is. What the error itself says may be the user's, and mention anything."""


def is_cut_off(error: BaseException) -> bool:
    """Return whether `error` comes from an exchange with other ranks that was cut off."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "HorovodInternalError" in names or type(error).__module__.startswith("mpi4py"):
        return True
    return bool(names & _CUT_OFF) and _is_of_horovod(error)


def _is_of_horovod(error: BaseException) -> bool:
    """Return whether an error of TensorFlow was raised by an op of Horovod."""
    op = getattr(error, "op", None)  # of a session of TensorFlow 1
    if op is not None:
        return str(op.type).startswith("Horovod")
    return _OF_HOROVOD.search(str(error)) is not None


def is_consequence(error: BaseException) -> bool:
    """Return whether `error`, or what it was raised from or while handling, is probably another rank's failure."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if is_cut_off(link):
            return True
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


_OF_TENSORFLOW = "Too many open files"
"""In the messages of its errors, which have no number."""


def reason(error: BaseException) -> str:
    """Return the error's message, and where the limit on open files is the reason, what it is and how to raise it."""
    limit = limit_reached(error)
    return str(error) if limit is None else f"{error}. {limit}"


def limit_reached(error: BaseException | None) -> str | None:
    """Return what to do where `error`, or what caused it, is that a process may open no more files; else None."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)) or _OF_TENSORFLOW in str(error):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            more = "" if hard == resource.RLIM_INFINITY else f" (this shell may go up to {hard})"
            return (
                f"A process of this job may open {soft} files at a time, which are too few: start it with `ulimit -n "
                f"4096`{more}, in its job script or in /etc/security/limits.conf."
            )
        error = error.__cause__ or error.__context__
    return None
