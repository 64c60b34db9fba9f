"""One process, one replica: the reference that every other backend must match."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hvdtrain.backends.no_op import NoOpCollectives
from hvdtrain.runtime.session import Session


class SingleBackend(NoOpCollectives):
    """The whole batch in this process."""

    name = "single"
    lacks = ()
    sends_together = False
    needs_builders = False
    workers = None

    def __init__(self, session: Session) -> None:
        self._session = session

    def scope(self) -> AbstractContextManager[Any]:
        """No context is needed."""
        return nullcontext()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step`."""
        return step(*args)

    def prepare(self, optimizer: Any) -> None:
        """Leave it as it is."""

    def close(self) -> None:
        """End the session."""
        self._session.close()
