"""Choose the backend that fits a session."""

from hvdtrain.backends.protocol import Backend
from hvdtrain.runtime.session import Session


def backend_for(session: Session) -> Backend:
    """Return the Horovod backend where Horovod runs, else the single one."""
    if session.collectives is None:
        from hvdtrain.backends.single import SingleBackend

        return SingleBackend(session)
    from hvdtrain.backends.horovod import HorovodBackend

    return HorovodBackend(session, session.collectives)
