"""Verify over the control channel that ranks agree on versions, settings and success."""

import contextlib
import json
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import TypeVar

from hvdtrain.config import errors
from hvdtrain.config.errors import ConfigError, LaunchError, UserError
from hvdtrain.runtime.control.channel import ControlChannel, gather, name_ranks

T = TypeVar("T")

# One importable package may come from distributions of several names.
DISTRIBUTIONS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "keras": ("keras", "keras-nightly"),
    "horovod": ("horovod",),
}


def version_of(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed; None if none is."""
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, TensorFlow, Keras and Horovod, without importing any of them."""
    packages = {name: version_of(*names) or "not installed" for name, names in DISTRIBUTIONS.items()}
    return {"python": platform.python_version(), **packages}


def agree(control: ControlChannel, facts: Mapping[str, str], *, timeout: float) -> None:
    """Check that every rank has the same facts (versions, a digest of the settings, …), by name.

    Raises:
        LaunchError: some differ: the same error on all ranks, naming each such fact, its values and the ranks
            with each. Or a rank did not come within ``timeout`` seconds.
    """
    differing = _differences(gather(control, dict(facts), timeout=timeout))
    if differing:
        raise LaunchError(f"The ranks of this job do not fit together: {'; '.join(differing)}.")


_CALL = "the call"


def encode_call(call: str, facts: Mapping[str, str]) -> bytes:
    """Return a call and what must be the same of it on every rank, as `check_same_call` compares them."""
    return json.dumps({_CALL: f"{call}()", **facts}).encode()


def check_same_call(everyone: Sequence[bytes], call: str) -> None:
    """Refuse ranks that do not make the same call with the same arguments.

    Args:
        everyone: what `encode_call` returned on each rank; more may follow after a newline.
        call: this rank's.

    Raises:
        ConfigError: the same on every rank that makes a call, naming what differs, the values and the ranks.
    """
    try:
        differing = _differences([json.loads(part.partition(b"\n")[0]) for part in everyone])
    except (ValueError, TypeError, AttributeError) as error:  # what another rank sent are no facts
        raise ConfigError(
            f"Every rank makes the same calls: {call}() was called, and another rank did something else, or has ended. "
            "Call it outside of `if rank() == 0:`, and print its result inside."
        ) from error
    if differing and differing[0].startswith(_CALL):
        raise ConfigError(f"Every rank makes the same calls. Received: {differing[0]}.")
    if differing:
        more = f" … and {len(differing) - 3} more" if len(differing) > 3 else ""
        found = "; ".join(differing[:3])
        raise ConfigError(f"Every rank calls {call}() with the same arguments. Received: {found}{more}.")


def _differences(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return, for each fact that differs by rank, "keras is 3.12 on ranks 0, 2 but 3.11 on rank 1"."""
    found = []
    for name in dict.fromkeys(name for theirs in facts for name in theirs):
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(facts):
            holders.setdefault(theirs.get(name, "not given"), []).append(rank)
        if len(holders) > 1:
            ordered = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))  # most common value first
            found.append(f"{name} is " + " but ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in ordered))
    return found


def together(control: ControlChannel, action: Callable[[], T], *, timeout: float) -> T:
    """Run ``action`` on every rank; where it is the user's mistake on any rank, raise it on every rank.

    Returns:
        This rank's own result.

    Raises:
        UserError: the same on all ranks; the bare message where all ranks say the same, else each message
            with its ranks. An error that is no UserError is this rank's own: it rises here only.
        LaunchError: a rank did not finish within ``timeout`` seconds of this one.
    """
    result, error = _attempt(action)
    everyone = gather(control, [_described(error), socket.gethostname()], timeout=timeout)
    outcomes = [outcome for outcome, _ in everyone]
    if any(outcomes):
        raise _common_error(outcomes, [host for _, host in everyone]) from error
    return result[0]


def on_first(control: ControlChannel, action: Callable[[], bytes], *, timeout: float) -> bytes:
    """Run ``action`` on rank 0 only, and return its result on every rank.

    Raises:
        UserError: rank 0's mistake, the same on all ranks.
        LaunchError: rank 0 did not finish within ``timeout`` seconds.
    """
    result, error = _attempt(action) if control.rank == 0 else ([b""], None)
    value = result[0] if error is None else b""
    first = control.exchange(json.dumps(_described(error)).encode() + b"\n" + value, timeout=timeout)[0]
    outcome, _, value = first.partition(b"\n")
    if json.loads(outcome):
        raise _revive(json.loads(outcome)) from error
    return value


def _attempt(action: Callable[[], T]) -> tuple[list[T], UserError | None]:
    """Return the result in a list, or an empty list and the user's mistake."""
    try:
        return [action()], None
    except UserError as error:
        return [], error


def _described(error: UserError | None) -> list[str]:
    """Return class name and message of an error; an empty list if there is none."""
    return [] if error is None else [type(error).__name__, error.message]


def _common_error(outcomes: Sequence[Sequence[str]], hosts: Sequence[str]) -> UserError:
    """Return one error for the outcomes of all ranks, at least one of which failed, which run on these hosts."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        ranks.setdefault(tuple(outcome), []).append(rank)
    if len(ranks) == 1:
        return _revive(outcomes[0])
    lines, kinds = [], set()
    for outcome, where in ranks.items():
        if outcome:
            theirs = sorted({hosts[rank] for rank in where})
            named = len(set(hosts)) > 1 and len(theirs) <= 4  # where the job has several hosts, and the ranks few
            names = f" ({', '.join(theirs)})" if named else ""
            lines.append(f"on {name_ranks(where)}{names}: {outcome[1]}")
            kinds.add(outcome[0])
    return _revive([kinds.pop() if len(kinds) == 1 else "UserError", "\n".join(lines)])


def _revive(outcome: Sequence[str]) -> UserError:
    """Return the error that another rank described; of a class that is not ours it keeps the text only."""
    kind = getattr(errors, outcome[0], None)
    if isinstance(kind, type) and issubclass(kind, UserError):
        return kind(outcome[1])
    return UserError(outcome[1])
