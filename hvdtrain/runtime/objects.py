"""Python objects between the ranks of a job, outside of TensorFlow, over the control channel.

They travel pickled in messages that are signed with the job's secret, and are unpickled only once the signature is
checked: a rank runs what other ranks of its own job send, and nobody else's.
"""

import pickle
from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.config.errors import ConfigError, LaunchError
from hvdtrain.runtime.control.agreement import check_same_call, encode_call
from hvdtrain.runtime.session import Session

MOST_BYTES = 2**30
"""Bytes of all objects of a call together. All of them pass through rank 0, and MPI counts them with 32 bits."""

_OBJECT, _ERROR = b"o", b"e"


def wait_for_all(session: Session, name: str, timeout: float | None) -> None:
    """Return once every rank has called it with this `name`."""
    _exchange(session, call="barrier", arguments={"name": name}, content=lambda: b"", timeout=timeout)


def object_of_root(session: Session, obj: Any, root_rank: int, timeout: float | None) -> Any:
    """Return on every rank the `obj` that rank `root_rank` has."""
    rank, size = session.control.rank, session.control.size
    if not hasattr(root_rank, "__index__") or not 0 <= root_rank < size:
        raise ConfigError(f"root_rank must be a rank of the job, 0 to {size - 1}. Received: {root_rank!r}.")
    if size == 1:
        return obj

    def mine() -> bytes:
        return _pickled(obj, MOST_BYTES) if rank == root_rank else b""

    everyone = _exchange(
        session, call="broadcast_object", arguments={"root_rank": root_rank}, content=mine, timeout=timeout
    )
    return obj if rank == root_rank else pickle.loads(everyone[root_rank])


def objects_of_all(session: Session, obj: Any, timeout: float | None) -> list[Any]:
    """Return on every rank the `obj` of each rank, in rank order."""
    rank, size = session.control.rank, session.control.size
    if size == 1:
        return [obj]
    everyone = _exchange(
        session, call="gather_object", arguments={}, content=lambda: _pickled(obj, MOST_BYTES // size), timeout=timeout
    )
    return [obj if place == rank else pickle.loads(content) for place, content in enumerate(everyone)]


def _exchange(
    session: Session, call: str, arguments: Mapping[str, Any], content: Callable[[], bytes], timeout: float | None
) -> list[bytes]:
    """Return what `content` returned on each rank.

    Raises:
        ConfigError: the same on every rank: ranks that make other calls, or on one of which `content` failed.
        LaunchError: a rank did not come in time; it is named.
    """
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"timeout must be positive, in seconds. Received: {timeout!r}.")
    try:
        body = _OBJECT + content()
    except ConfigError as error:
        body = _ERROR + str(error).encode()
    message = encode_call(call, {name: repr(value) for name, value in arguments.items()}) + b"\n" + body
    try:
        everyone = session.control.exchange(
            message, timeout=session.config.load_timeout if timeout is None else timeout
        )
    except LaunchError as error:
        raise LaunchError(f"hvdtrain.{call}(): {error} Where ranks may take longer, pass timeout=SECONDS.") from error
    check_same_call(everyone, call)
    bodies = [each.partition(b"\n")[2] for each in everyone]
    for rank, each in enumerate(bodies):
        if each[:1] == _ERROR:
            raise ConfigError(f"rank {rank}: hvdtrain.{call}(): {each[1:].decode()}")
    return [each[1:] for each in bodies]


def _pickled(obj: Any, most: int) -> bytes:
    try:
        content = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever an object's own __reduce__ raises
        raise ConfigError(
            f"The object must be one that pickle takes. Received: {type(obj).__name__} ({type(error).__name__}: "
            f"{error}). Send what it holds instead, as numbers, arrays, lists and dicts."
        ) from error
    if len(content) > most:
        raise ConfigError(
            f"The objects of all ranks must not be larger than {MOST_BYTES:,} bytes together. Received: "
            f"{len(content):,} bytes on this rank, which may send {most:,}. Use a file, or hvdtrain.horovod's "
            "allgather() and broadcast() for tensors."
        )
    return content
