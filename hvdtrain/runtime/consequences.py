"""Telling the cause of a failure from what it looks like on the other ranks. Decided by names: nothing is imported."""

_TRANSPORTS = ("Horovod", "gloo", "MPI_", "NCCL", "nccl")
"""One of these is in the message of an exchange that was cut off; the op's own name may be anything."""

_CUT_OFF = {"UnknownError", "AbortedError"}
"""TensorFlow's errors for it. Of others a mistake of this rank's own is the cause, if only in what it exchanges."""


def is_cut_off(error: BaseException) -> bool:
    """Tell whether `error` says that an exchange with other ranks was cut off."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "HorovodInternalError" in names or type(error).__module__.startswith("mpi4py"):
        return True
    return bool(names & _CUT_OFF) and any(word in str(error) for word in _TRANSPORTS)


def is_consequence(error: BaseException) -> bool:
    """Tell whether `error`, or what it was raised from or while handling, is probably another rank's failure."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if is_cut_off(link):
            return True
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False
