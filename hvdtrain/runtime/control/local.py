"""The control channel of a process that is alone."""

from collections.abc import Callable
from typing import NoReturn

from hvdtrain.runtime.control.board import StatusBoard
from hvdtrain.runtime.control.channel import OnWait, end_process
from hvdtrain.runtime.control.signing import Signer


class LocalChannel:
    """The channel of a process that is alone."""

    rank = 0
    size = 1
    unanswered_s = 0.0

    def __init__(self) -> None:
        self.while_waiting: Callable[[], None] = lambda: None
        """Never called: there is nobody to wait for."""
        self._board = StatusBoard(_NoTransport(), Signer(b"", ""), self.rank)

    def exchange(self, payload: bytes, *, timeout: float) -> list[bytes]:
        """Return the payload: there is nobody else."""
        return [payload]

    def barrier(self, timeout: float, *, on_wait: OnWait | None = None) -> None:
        """Return: everybody is here."""

    def post(self, key: str, value: bytes) -> None:
        """Keep it for this process to read."""
        self._board.post(key, value)

    def read(self, key: str) -> dict[int, bytes]:
        """Return what this process has posted."""
        return self._board.read(key)

    def report_failure(self, text: str) -> None:
        """Do nothing: there is nobody to tell."""

    def failures(self) -> dict[int, str]:
        """Return no failures: nobody else can fail."""
        return {}

    def abort(self, code: int) -> NoReturn:
        """End this process."""
        end_process(code)

    def close(self) -> None:
        """Do nothing: nothing is held."""


class _NoTransport:
    """Carries nothing: there is nobody else."""

    def post(self, message: bytes) -> None:
        """See `BoardTransport.post`."""

    def posted(self) -> dict[int, bytes]:
        """See `BoardTransport.posted`."""
        return {}
