"""The limit on open files, where a job has reached it."""

import errno
import resource

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
