"""Parsing a command line on every rank, with the files that it names as the first rank sees them."""

from collections.abc import Callable
from typing import TypeVar

from hvdtrain.config.errors import UserError
from hvdtrain.config.files import FilesRead, decoded
from hvdtrain.runtime.control.agreement import together
from hvdtrain.runtime.control.channel import ControlChannel

T = TypeVar("T")


def parsed_on_all_ranks(
    control: ControlChannel, parse: Callable[[FilesRead], T], known: FilesRead, *, timeout: float
) -> tuple[T, FilesRead]:
    """Parse on every rank, and return what was parsed and the files that it took.

    Args:
        control: the channel to the other ranks.
        parse: parses the command line; reads files by its argument.
        known: what was read in an earlier world of an elastic job, in which another rank may have been the first.
        timeout: seconds to wait for the other ranks.

    Raises:
        UserError: see `together`.
    """
    files = FilesRead(known.contents)
    attempt = _attempt(parse, files)
    if control.size > 1:
        mine = files.encode()
        firsts = control.exchange(mine if control.rank == 0 else b"", timeout=timeout)[0]
        if mine != firsts:
            files = FilesRead(decoded(firsts))
            attempt = _attempt(parse, files)
    return together(control, attempt, timeout=timeout), files


def _attempt(parse: Callable[[FilesRead], T], files: FilesRead) -> Callable[[], T]:
    """Parse, and return a function that returns the result, or raises the user's mistake."""
    try:
        result = parse(files)
    except UserError as error:
        mistake = error

        def fail() -> T:
            raise mistake

        return fail
    return lambda: result
