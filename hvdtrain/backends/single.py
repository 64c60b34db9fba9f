"""One process, one replica: the reference that every other backend must match."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hvdtrain.backends.no_op import NoOpCollectives
from hvdtrain.backends.protocol import Capabilities
from hvdtrain.runtime.session import Session


class SingleBackend(NoOpCollectives):
    """The whole batch in this process."""

    name = "single"
    capabilities = Capabilities()
    roles: Mapping[str, int] = {}

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
