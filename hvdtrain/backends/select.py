"""Choose the backend that fits a session."""

from hvdtrain.backends.protocol import Backend
from hvdtrain.runtime.session import Session, current


def backend_for(session: Session) -> Backend:
    """Return the backend of the strategy that the session holds, of Horovod where it runs, else the single one."""
    if session.strategy is not None:
        from hvdtrain.backends.tf_distribute import StrategyBackend

        return StrategyBackend(session, session.strategy)
    if session.collectives is None:
        from hvdtrain.backends.single import SingleBackend

        return SingleBackend(session)
    from hvdtrain.backends.horovod import HorovodBackend

    return HorovodBackend(session, session.collectives)


def current_exchange() -> Backend:
    """Return the backend of the current session.

    Raises:
        LaunchError: `hvdtrain.init()` was not called.
    """
    return backend_for(current())
