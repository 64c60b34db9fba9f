"""Choose the backend that fits a session."""

from hvdtrain.backends.planned import PlannedBackend, PlannedWorld
from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.runtime.session import Session, current


def backend_for(session: Session) -> Backend:
    """Return the backend of the strategy that the session holds, of Horovod where it runs, else the single one."""
    if session.strategy is not None and session.strategy.roles is not None:
        from hvdtrain.backends.parameter_server import ParameterServerBackend

        return ParameterServerBackend(session, session.strategy)
    if session.strategy is not None:
        from hvdtrain.backends.tf_distribute import StrategyBackend

        return StrategyBackend(session, session.strategy)
    if isinstance(session.world, PlannedWorld):
        return PlannedBackend(session)
    if not session.world.collectives:
        from hvdtrain.backends.single import SingleBackend

        return SingleBackend(session)
    from hvdtrain.backends.horovod import HorovodBackend

    return HorovodBackend(session)


def current_exchange() -> Backend:
    """Return the backend of the current session, for a loop of one's own.

    Raises:
        ConfigError: its replicas exchange nothing with one another.
        LaunchError: `hvdtrain.init()` was not called.
    """
    backend = backend_for(current())
    if backend.capabilities.asynchronous:
        raise ConfigError(
            f"The workers of {opt('backend', backend.name)} exchange nothing with one another, and only Trainer sends "
            "them "
            f"to work: in a loop of your own use {opt('backend', 'horovod')}."
        )
    return backend
