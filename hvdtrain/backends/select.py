"""Choose the backend that fits a session."""

from hvdtrain.backends.planned import PlannedBackend, PlannedWorld
from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.runtime.session import Session, current


def backend_for(session: Session) -> Backend:
    """Return the session's backend: tf.distribute if it has a strategy, Horovod if running, else single."""
    if session.strategy is not None and session.strategy.roles is not None:
        from hvdtrain.backends.parameter_server import ParameterServerBackend

        return ParameterServerBackend(session, session.strategy)
    if session.strategy is not None and session.strategy.name == "central_storage":
        from hvdtrain.backends.central_storage import CentralStorageBackend

        return CentralStorageBackend(session, session.strategy)
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


def backend_of_process() -> Backend:
    """Return the backend of the process's session. Raises LaunchError: `hvdtrain.init()` was not called."""
    return backend_for(current())


def current_exchange() -> Backend:
    """Return the backend of the process's session, for a custom loop.

    Raises:
        ConfigError: its workers do not communicate.
        LaunchError: `hvdtrain.init()` was not called.
    """
    session = current()
    session.exchanges = True
    backend = backend_for(session)
    if backend.capabilities.asynchronous:
        raise ConfigError(
            f"The workers of {opt('backend', backend.name)} exchange nothing with one another, and only Trainer sends "
            "them "
            f"to work: in a loop of your own use {opt('backend', 'horovod')}."
        )
    return backend
